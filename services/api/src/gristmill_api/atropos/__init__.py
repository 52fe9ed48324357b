"""Atropos' protocol at the API's root, over the store of /v1. Environments and trainers of Atropos work unchanged.

    routes        all routes of the protocol: gzip in both directions, errors in the shape that the clients read
    messages      the request bodies, read as loosely as Atropos reads them, and the lengths that must agree in a group
    parse         reads the groups in a body
    conversion    a group as the store keeps it, and as JSON again
    queue         the run that the root is bound to, in the store
    env_status    the answer of /status-env
    delivery      a batch that is being sent to the trainer
    backpressure  waits while the store is full or away, and then answers 503, never 4xx

All state is in Redis, so clients notice neither a restart of the API nor a restart of Redis. docs/from-atropos.md
lists what is the same as in Atropos and what is fixed.
"""

from starlette.routing import Route

from gristmill_api.atropos.routes import AtroposContext, router

paths = frozenset(route.path for route in router.routes if isinstance(route, Route))
"""Paths at which errors have the shape that Atropos' clients read."""

__all__ = ["AtroposContext", "paths", "router"]
