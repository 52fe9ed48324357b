"""The role that each route needs, in one table, and the description of the table in OpenAPI.

A route that is not in the table is for the role admin. `{}` represents any one segment of the path. HEAD needs the role
of GET. A test compares the table with the application's routes, so no route is forgotten and no line is left over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Final

from fastapi import FastAPI

from gristmill.internal.calls import WORD_HEADER
from gristmill_api.access.settings import Role
from gristmill_api.http.error_handlers import documented


class Need(Enum):
    """The roles that a request needs, and whether the request only reads."""

    NOBODY = "no token"
    READ = "any role"
    ENV = "env"
    TRAINER = "trainer"
    ENV_OR_TRAINER = "env or trainer"
    ADMIN = "admin"

    @property
    def roles(self) -> frozenset[Role]:
        """The roles that may send the request; empty: no token is needed."""
        return _ROLES[self]

    @property
    def reads(self) -> bool:
        """True if the request changes nothing, so a page of any site may send it."""
        return self in (Need.NOBODY, Need.READ)


_ROLES: Final = {
    Need.NOBODY: frozenset[Role](),
    Need.READ: frozenset(Role),
    Need.ENV: frozenset({Role.ENV, Role.ADMIN}),
    Need.TRAINER: frozenset({Role.TRAINER, Role.ADMIN}),
    Need.ENV_OR_TRAINER: frozenset(Role),
    Need.ADMIN: frozenset({Role.ADMIN}),
}

_TABLE: Final = {
    Need.NOBODY: [
        "GET /healthz",
        "GET /readyz",
    ],
    Need.READ: [
        "GET /metrics",
        "GET /openapi.json",
        "GET /",
        "GET /info",
        "GET /status",
        "GET /wandb_info",
        "GET /latest_example",
        "GET /v1/open",
        "GET /v1/runs",
        "GET /v1/runs/{}",
        "GET /v1/runs/{}/status",
        "GET /v1/runs/{}/groups",
        "GET /v1/runs/{}/groups/{}",
        "GET /v1/runs/{}/envs",
        "GET /v1/runs/{}/dead",
        "GET /v1/runs/{}/metrics",
        "GET /v1/runs/{}/metrics/{}",
        "GET /v1/runs/{}/events",
        "GET /v1/runs/{}/examples",
        "GET /view/api/runs",
        "GET /view/api/runs/{}",
        "GET /view/api/runs/{}/series",
        "GET /view/api/runs/{}/steps/{}",
        "GET /view/api/runs/{}/steps/{}/timeline",
        "GET /view/api/runs/{}/groups/{}",
        "GET /view/api/runs/{}/groups/{}/prompt",
        "GET /view/api/runs/{}/rollouts",
        "GET /view/api/runs/{}/events",
        "GET /view/api/runs/{}/download",
        "GET /view/api/compare",
    ],
    Need.ENV: [
        "POST /v1/runs",
        "POST /v1/runs/{}/permits",
        "POST /v1/runs/{}/permits/renew",
        "POST /v1/runs/{}/permits/return",
        "POST /v1/runs/{}/permits/abandon",
        "POST /v1/runs/{}/envs",
        "POST /v1/runs/{}/envs/{}/heartbeat",
        "DELETE /v1/runs/{}/envs/{}",
        "POST /v1/runs/{}/claims",
        "PUT /v1/runs/{}/groups/{}",
    ],
    Need.TRAINER: [
        "POST /register",
        "GET /batch",
        "GET /reset_data",
        "POST /v1/runs/{}/take",
        "POST /v1/runs/{}/version",
        "POST /v1/runs/{}/lease",
        "POST /v1/runs/{}/extend",
        "POST /v1/runs/{}/ack",
        "POST /v1/runs/{}/nack",
        "POST /v1/runs/{}/finish",
    ],
    Need.ENV_OR_TRAINER: [
        # Tools of Atropos that only generate data are environment and trainer at once: the trainer's token is enough.
        "POST /register-env",
        "POST /disconnect-env",
        "GET /status-env",
        "POST /scored_data",
        "POST /scored_data_list",
        "POST /v1/runs/{}/metrics",
    ],
    Need.ADMIN: [
        "POST /v1/runs/{}/close",
        "DELETE /v1/runs/{}",
        "POST /v1/runs/{}/dead/replay",
        "POST /v1/runs/{}/dead/purge",
    ],
}

Match = Callable[[str], re.Match[str] | None]


def _index() -> dict[tuple[str, int], list[tuple[Match, Need]]]:
    """Returns the table by method and number of slashes."""
    index: dict[tuple[str, int], list[tuple[Match, Need]]] = {}
    for method, path, need in rules():
        pattern = re.compile("[^/]+".join(map(re.escape, path.split("{}"))))
        index.setdefault((method, path.count("/")), []).append((pattern.fullmatch, need))
    return index


def rules() -> Iterator[tuple[str, str, Need]]:
    """Yields every line of the table: method, path with `{}`, need."""
    for need, routes in _TABLE.items():
        for route in routes:
            method, _, path = route.partition(" ")
            yield method, path, need


_INDEX: Final = _index()


def needed(method: str, path: str) -> Need:
    """Returns what a request, or a route's template, needs."""
    for matches, need in _INDEX.get(("GET" if method == "HEAD" else method, path.count("/")), ()):
        if matches(path):
            return need
    return Need.ADMIN


_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "The token of a role: env, trainer or admin."},
    "basic": {
        "type": "http",
        "scheme": "basic",
        "description": "The token as the password, with any user name: http://env:TOKEN@host:8000.",
    },
}
_CREATION: Final = {
    "name": "creation",
    "in": "query",
    "required": False,
    "schema": {"type": "string", "pattern": "^[0-9a-f]{1,64}$"},
    "description": "`creation` of the run's record. If the run was deleted and created again since, the call is "
    "refused (409 other_creation).",
}
_WORD: Final = {
    "name": WORD_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{16,128}$"},
    "description": "The word of the environment's registration. With tokens, an environment's call under a name that "
    "was registered with another word is refused (409 other_registration).",
}
_METHODS: Final = ("get", "post", "put", "delete")


def install_openapi(app: FastAPI, tokens: bool) -> None:
    """Add to each operation its role as `x-role` and its refusals; with `tokens`, also that a token is needed."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make()
            for path, operations in schema["paths"].items():
                for method in _METHODS:
                    if method in operations:
                        need = needed(method.upper(), path)
                        _describe(operations[method], need, tokens)
                        added = operations[method].setdefault("parameters", [])
                        if "/runs/{run_id}/" in path and method != "get":
                            added.append(_CREATION)
                        if path.startswith("/v1/runs") and Role.ENV in need.roles and not need.reads:
                            added.append(_WORD)
            if tokens:
                schema.setdefault("components", {})["securitySchemes"] = _SCHEMES
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend the schema


def _describe(operation: dict[str, Any], need: Need, tokens: bool) -> None:
    operation["x-role"] = need.value
    refusals = []
    if tokens and need.roles:
        operation["security"] = [{"bearer": []}, {"basic": []}]
        operation["responses"]["401"] = documented("The request has no token, or an unknown token.")
        refusals.append(f"The token's role is not allowed. The operation is for: {need.value}.")
    if not need.reads:
        refusals.append("A browser sent the request for a page of another site.")
    if refusals:
        operation["responses"]["403"] = documented(" Or: ".join(refusals))
