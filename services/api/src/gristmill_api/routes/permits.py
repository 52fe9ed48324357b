"""Permits: leave to generate the group of one dataset row. They bound how far generation runs ahead of training."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints

from gristmill import PermitGrant, RowResult, RunState
from gristmill.internal.logs import line
from gristmill_api.context import Ctx, Id, Name, RequestModel, RunId
from gristmill_api.store import keys
from gristmill_api.store.permits import Renewal

_LOG = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/runs/{run_id}/permits", tags=["permits"])


class Ask(RequestModel):
    holder: Name
    count: Annotated[int, Field(ge=1, le=1024)] = 1
    wait: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds to wait for the first permit."""


class Renew(RequestModel):
    holder: Name
    group_ids: Annotated[list[Id], Field(max_length=65536)] | None = None
    """The permits the holder is working on; None renews all it has. Name them: a permit whose grant was lost on
    the way would otherwise be kept alive, and its capacity with it, by a holder that does not know it has it."""


class Return(RequestModel):
    holder: Name
    group_id: Id
    reason: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,64}$")]
    """ "abandoned": another holder may have it. Any other word drops the group and is counted."""
    result: RowResult | None = None
    """Of the dropped group, if it was scored, in a run whose rows may rest."""


class Abandon(RequestModel):
    holder: Name


class Abandoned(RequestModel):
    abandoned: int


@router.post("")
async def permits(ctx: Ctx, request: Request, run_id: RunId, body: Ask) -> PermitGrant:
    """Up to `count` permits; an empty list when none came free in `wait` seconds or the run is finished."""
    last: PermitGrant | None = None

    async def attempt() -> PermitGrant | None:
        nonlocal last
        last = await ctx.store.permits.grant(run_id, body.holder, body.count)
        return last if last.permits or last.state is RunState.FINISHED else None

    await ctx.notifications.poll(keys.permits_topic(run_id), attempt, ctx.wait(body.wait), request.is_disconnected)
    assert last is not None
    return last


@router.post("/renew")
async def renew(ctx: Ctx, run_id: RunId, body: Renew) -> Renewal:
    """Keep permits alive. `lost` names those that went to another holder, were dropped or submitted."""
    return await ctx.store.permits.renew(run_id, body.holder, body.group_ids)


@router.post("/return")
async def give_back(ctx: Ctx, run_id: RunId, body: Return) -> dict[str, str]:
    """Give one permit back."""
    new = await ctx.store.permits.return_permit(run_id, body.holder, body.group_id, body.reason, body.result)
    if new:
        _LOG.info(line("drop", run=run_id, group=body.group_id, reason=body.reason, holder=body.holder))
    return {}


@router.post("/abandon")
async def abandon(ctx: Ctx, run_id: RunId, body: Abandon) -> Abandoned:
    """Give back all the holder's permits: at the start of an environment, and when it stops."""
    count = await ctx.store.permits.release_all(run_id, body.holder)
    if count:
        _LOG.info(line("abandon", run=run_id, holder=body.holder, permits=count))
    return Abandoned(abandoned=count)
