"""Atropos' protocol at the root, over the store that /v1 uses: its environments and trainers work unchanged.

    messages     the bodies, as lax as Atropos reads them
    scored       a group's JSON text: checked at the speed of a scan, cut into the text that is stored
    lengths      what must agree inside a group
    translate    between that text and the binary group of /v1
    adopt        the text becomes that group, when a trainer leases it over /v1

    queue        the run that the root is bound to: one method a verb, one Lua script a method (store/lua/atropos_*)
    figures      what an environment hears of the queue and of the others
    delivery     a batch on its way to the trainer
    patience     the store is full, or away: clients wait here, and hear 503, never 4xx
    door         all of these, as the handlers get them

    speech       gzip both ways (inflate, deflate), errors in the shapes that the clients know
    trainer      /, /register, /batch, /info, /wandb_info, /status, /reset_data
    envs         /register-env, /disconnect-env, /status-env
    data         /scored_data, /scored_data_list, /latest_example

All state is in Redis, so clients notice neither a restart of the API nor one of Redis. docs/from-atropos.md lists
what is equal and what is fixed.
"""

from fastapi import APIRouter
from starlette.routing import Route

from gristmill_api.atropos import data, envs, trainer
from gristmill_api.atropos.door import Door
from gristmill_api.atropos.speech import REFUSALS

router = APIRouter(responses=REFUSALS)
hot = [*data.hot, *trainer.hot]
"""Routes to be put into the application before any router, as they are: every group passes them."""
_routes = [*hot]
for _module in (trainer, envs, data):
    router.include_router(_module.router)
    _routes += _module.router.routes

paths = frozenset(route.path for route in _routes if isinstance(route, Route))
"""Paths at which errors have the shape that Atropos' clients know."""

__all__ = ["Door", "hot", "paths", "router"]
