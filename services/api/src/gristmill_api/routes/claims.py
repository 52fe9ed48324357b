"""Work that one of several environments is to do: they claim it, and one of them has it."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from gristmill import Claim
from gristmill.logs import line
from gristmill_api.context import Body, Ctx, Name, RunId

_LOG = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/runs/{run_id}/claims", tags=["environments"])


class ClaimRequest(Body):
    name: Name
    """What is claimed: "evaluation-100"."""
    holder: Name
    """Who claims it."""
    ttl: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)]
    """Seconds until the claim expires, unless its holder renews it by another call."""


@router.post("")
async def claim(ctx: Ctx, run_id: RunId, body: ClaimRequest) -> Claim:
    """Claim a piece of work, or keep it for another `ttl`. The answer names the holder that has it.

    It works on finished runs too: their last version may still be evaluated. A run has 64 claims at a time.
    """
    holder = await ctx.store.claims.claim(run_id, body.name, body.holder, round(body.ttl * 1000))
    _LOG.debug(line("claim", run=run_id, name=body.name, holder=holder))
    return Claim(name=body.name, holder=holder)
