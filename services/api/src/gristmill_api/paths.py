"""Paths of requests behind a reverse proxy that serves the API under a prefix (`uvicorn --root-path /prefix`)."""

# Every middleware uses the function of the router, so that a role is checked for the same path that is then served.
from starlette._utils import get_route_path as route_path

__all__ = ["route_path"]
