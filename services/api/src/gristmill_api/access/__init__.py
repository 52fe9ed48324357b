"""Decides which requests the API accepts, and from where.

settings      the three roles, their tokens, and API_AUTH, API_TOKENS_DIR, API_CORS_ORIGINS, API_ALLOWED_HOSTS
permissions   the role that each route needs, and its description in OpenAPI
guard         the middlewares: 421 for other hosts, 401 and 403
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from gristmill.internal.calls import WORD_HEADER
from gristmill_api.access.guard import Guard
from gristmill_api.access.permissions import install_openapi
from gristmill_api.access.settings import AccessSettings

__all__ = ["AccessSettings", "install_openapi", "middlewares"]


def middlewares(settings: AccessSettings) -> list[Middleware]:
    """Returns CORS, if origins are named, and the guard: a browser's preflight request has no token."""
    guard = Middleware(Guard, tokens=settings.tokens, origins=settings.cors_origins)
    if not settings.cors_origins:
        return [guard]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=["GET", "POST", "PUT", "DELETE"],
        allow_headers=["Authorization", "Content-Type", "Content-Encoding", "Last-Event-ID", WORD_HEADER],
        expose_headers=["Retry-After", "Gristmill-Dead"],
    )
    return [cors, guard]
