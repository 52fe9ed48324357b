"""The API's doors. Each module is one router:

    health   /healthz /readyz /metrics
    runs     /v1/runs, /v1/open: the run record, taking a run, its policy version, its end, its status
    permits  /v1/runs/{run}/permits: leave to generate a group
    groups   /v1/runs/{run}/groups: submit one, list them all
    lease    /v1/runs/{run}/lease, extend, nack, ack: the trainer's side
    envs     /v1/runs/{run}/envs: environments that want a share of their own
    claims   /v1/runs/{run}/claims: work that one of several environments is to do
    dead     /v1/runs/{run}/dead: groups that were set aside
    journal  /v1/runs/{run}/metrics, events, examples: what there is to look at

`native` holds them all, and tells what each may refuse (refusals.py). Atropos' protocol speaks at the root (/register,
/scored_data, /batch, ...) over the same store: see the package gristmill_api.atropos.
"""

from fastapi import APIRouter

from gristmill_api.routes import claims, dead, envs, groups, health, journal, lease, permits, runs
from gristmill_api.routes.refusals import REFUSALS

native = APIRouter(responses=REFUSALS)
for _module in (health, runs, permits, groups, lease, envs, claims, dead, journal):
    native.include_router(_module.router)

hot = [*groups.direct.routes, *lease.direct.routes]
"""Routes to be put into the application before `native`, as they are: see direct.py."""

__all__ = ["hot", "native"]
