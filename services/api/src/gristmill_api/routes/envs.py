"""Environments that register get their share of permits and batches; others are served as they come."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field

from gristmill import Environment
from gristmill.logs import line
from gristmill_api import errors
from gristmill_api.context import NAME_PATTERN, Body, Ctx, Name, RunId

_LOG = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/runs/{run_id}/envs", tags=["environments"])

EnvId = Annotated[str, Path(pattern=NAME_PATTERN)]


class Register(Body):
    env_id: Name
    """The name under which it holds permits and sends groups."""
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    """It may hold this part of the live environments' summed weights of all permits; null: what comes."""
    min_batch_allocation: Annotated[float, Field(gt=0, le=1)] | None = None
    """This share of every batch is kept for its groups, as far as they can still come, while it lives."""


@router.post("")
async def register(ctx: Ctx, run_id: RunId, body: Register) -> Environment:
    """Register an environment, or change what it registered. It lives while it asks for permits or sends heartbeats."""
    await ctx.store.envs.register(run_id, body.env_id, body.weight, body.min_batch_allocation)
    _LOG.info(line("env", run=run_id, env=body.env_id, weight=body.weight, min_batch=body.min_batch_allocation))
    return Environment(**body.model_dump(), alive=True)


@router.get("")
async def environments(ctx: Ctx, run_id: RunId) -> list[Environment]:
    """All that registered and did not leave."""
    await ctx.store.record(run_id)
    return await ctx.store.envs.all(run_id)


@router.post("/{env_id}/heartbeat", status_code=204)
async def heartbeat(ctx: Ctx, run_id: RunId, env_id: EnvId) -> None:
    """Tell that the environment lives."""
    await ctx.store.envs.heartbeat(run_id, env_id)


@router.delete("/{env_id}", status_code=204)
async def leave(ctx: Ctx, run_id: RunId, env_id: EnvId) -> None:
    """The environment goes. Its permits are given back by `permits/abandon`."""
    if not await ctx.store.envs.leave(run_id, env_id):
        raise errors.env_missing(run_id, env_id)
    _LOG.info(line("env", run=run_id, env=env_id, state="gone"))
