"""Which role each route needs, in one table. A route that is not in it is the admin's alone.

`{}` stands for any one segment of the path. HEAD needs what GET needs. A test compares the table with the
application's routes, so that none is forgotten and none is left over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final

from gristmill_api.access.tokens import Role


class Need(Enum):
    """Who may, and whether it only reads."""

    NOBODY = "no token"
    READ = "any role"
    ENV = "env"
    TRAINER = "trainer"
    WORK = "env or trainer"
    ADMIN = "admin"

    @property
    def roles(self) -> frozenset[Role]:
        """The roles that may; empty: nobody need say who he is."""
        return _ROLES[self]

    @property
    def reads(self) -> bool:
        """True when such a request changes nothing, so that it may come from anywhere."""
        return self in (Need.NOBODY, Need.READ)


_ROLES: Final = {
    Need.NOBODY: frozenset[Role](),
    Need.READ: frozenset(Role),
    Need.ENV: frozenset({Role.ENV, Role.ADMIN}),
    Need.TRAINER: frozenset({Role.TRAINER, Role.ADMIN}),
    Need.WORK: frozenset(Role),
    Need.ADMIN: frozenset({Role.ADMIN}),
}

_TABLE: Final = {
    Need.NOBODY: [
        "GET /healthz",
        "GET /readyz",
    ],
    Need.READ: [
        "GET /metrics",
        "GET /docs",
        "GET /docs/oauth2-redirect",
        "GET /redoc",
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
    Need.WORK: [
        # Atropos' tools that only generate data are environment and trainer in one: the trainer's token is enough.
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
    """By method and number of slashes."""
    index: dict[tuple[str, int], list[tuple[Match, Need]]] = {}
    for method, path, need in rules():
        pattern = re.compile("[^/]+".join(map(re.escape, path.split("{}"))))
        index.setdefault((method, path.count("/")), []).append((pattern.fullmatch, need))
    return index


def rules() -> Iterator[tuple[str, str, Need]]:
    """Every line of the table: method, path with `{}`, need."""
    for need, routes in _TABLE.items():
        for route in routes:
            method, _, path = route.partition(" ")
            yield method, path, need


_INDEX: Final = _index()


def needed(method: str, path: str) -> Need:
    """What a request, or a route's template, needs."""
    for matches, need in _INDEX.get(("GET" if method == "HEAD" else method, path.count("/")), ()):
        if matches(path):
            return need
    return Need.ADMIN
