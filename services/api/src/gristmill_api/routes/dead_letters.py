"""Dead letters: list them, make them ready again, drop them."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from gristmill import DeadLetter
from gristmill.internal.logs import line
from gristmill_api.context import Ctx, Id, RequestModel, RunId

_LOG = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/runs/{run_id}/dead", tags=["dead letters"])


class Which(RequestModel):
    group_ids: Annotated[list[Id], Field(max_length=4096)] | None = None
    """null: all of them."""


class Settled(RequestModel):
    groups: int


@router.get("")
async def letters(
    ctx: Ctx,
    run_id: RunId,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=1024)] = 100,
) -> list[DeadLetter]:
    """Groups that became dead letters, oldest first. Their bytes are at /v1/runs/{run_id}/groups/{group_id}."""
    await ctx.store.runs.record(run_id)
    return await ctx.store.dead_letters.all(run_id, offset, limit)


@router.post("/replay")
async def replay(ctx: Ctx, run_id: RunId, body: Which) -> Settled:
    """Make the groups ready again, in their old places and with all their attempts."""
    groups = await ctx.store.dead_letters.replay(run_id, body.group_ids)
    _LOG.info(line("replay", run=run_id, groups=groups))
    return Settled(groups=groups)


@router.post("/purge")
async def purge(ctx: Ctx, run_id: RunId, body: Which) -> Settled:
    """Drop the groups. They count as dropped with the reason "purged"."""
    groups = await ctx.store.dead_letters.purge(run_id, body.group_ids)
    _LOG.info(line("purge", run=run_id, groups=groups))
    return Settled(groups=groups)
