"""The routes of /v1. Each module is one router:

    health        /healthz /readyz /metrics
    runs          /v1/runs, /v1/open: the run record, taking a run, its policy version, its end, its status
    permits       /v1/runs/{run}/permits: permission to generate a group
    groups        /v1/runs/{run}/groups: submit a group, read a group, list all groups
    lease         /v1/runs/{run}/lease, extend, nack, ack: the trainer's side
    envs          /v1/runs/{run}/envs, claims: registered environments, and work that one of them does
    dead_letters  /v1/runs/{run}/dead: groups that no batch can hold
    journal       /v1/runs/{run}/metrics, events, examples

The package gristmill_api.atropos serves Atropos' protocol at the root (/register, /scored_data, /batch, ...) over the
same store.
"""

from fastapi import APIRouter

from gristmill_api.http.error_handlers import REFUSALS
from gristmill_api.routes import dead_letters, envs, groups, health, journal, lease, permits, runs

_modules = (health, runs, permits, groups, lease, envs, dead_letters, journal)
native = APIRouter(responses=REFUSALS)
for _module in _modules:
    native.include_router(_module.router)

all_routes = [route for module in _modules for route in module.router.routes]

__all__ = ["all_routes", "native"]
