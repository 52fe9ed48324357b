"""Registered environments, which get a share of permits and batches, and claims: work that one environment does."""

from __future__ import annotations

import logging
import secrets
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field

from gristmill import Claim, Environment
from gristmill.internal.logs import line
from gristmill_api import errors
from gristmill_api.context import Ctx, Name, RequestModel, RunId, Word
from gristmill_api.routes.journal import OWN_SOURCES
from gristmill_api.store.envs import REPORT_CLAIM

_LOG = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/runs/{run_id}", tags=["environments"])

EnvId = Annotated[Name, Path()]


class Register(RequestModel):
    env_id: Name
    """The name under which it holds permits and sends groups."""
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    """The environment may hold permits in proportion to its weight among live environments; null: no limit."""
    heartbeat_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] | None = None
    """Seconds between its heartbeats; null: none at regular times. Views of the run report one that misses two."""


class Registered(Environment):
    word: str
    """From the header `Gristmill-Word` of the request, else random. With tokens, an environment's calls under this name
    need it in that header."""


@router.post("/envs")
async def register(ctx: Ctx, run_id: RunId, body: Register, given: Word) -> Registered:
    """Register an environment, or change what it registered. An environment is
    alive while it asks for permits or sends heartbeats."""
    if body.env_id in OWN_SOURCES:
        raise errors.bad_request(
            f"{body.env_id!r} is a source of Gristmill's own metrics. Choose another name for the environment."
        )
    word = given or secrets.token_hex(16)
    await ctx.store.envs.register(run_id, body.env_id, body.weight, body.heartbeat_s, word)
    _LOG.info(line("env", run=run_id, env=body.env_id, weight=body.weight))
    return Registered(**body.model_dump(), alive=True, last_seen_s=0, word=word)


@router.get("/envs")
async def environments(ctx: Ctx, run_id: RunId) -> list[Environment]:
    """All registered environments."""
    await ctx.store.runs.record(run_id)
    return await ctx.store.envs.all(run_id)


@router.post("/envs/{env_id}/heartbeat", status_code=204)
async def heartbeat(ctx: Ctx, run_id: RunId, env_id: EnvId) -> None:
    """Report that the environment is alive."""
    await ctx.store.envs.heartbeat(run_id, env_id)


@router.delete("/envs/{env_id}", status_code=204)
async def leave(ctx: Ctx, run_id: RunId, env_id: EnvId) -> None:
    """Unregister the environment. `permits/abandon` returns its permits."""
    if not await ctx.store.envs.unregister(run_id, env_id):
        raise errors.env_missing(run_id, env_id)
    _LOG.info(line("env", run=run_id, env=env_id, state="gone"))


class ClaimRequest(RequestModel):
    name: Name
    """The work that is claimed, such as "evaluation-100"."""
    holder: Name
    """The process that claims the work."""
    ttl: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)]
    """Seconds until the claim expires, unless its holder renews it by another call."""


@router.post("/claims")
async def claim(ctx: Ctx, run_id: RunId, body: ClaimRequest) -> Claim:
    """Claim a piece of work, or keep it for another `ttl`. The answer names the holder that has it.

    It works on finished runs too: their last version may still be evaluated. A run has 64 claims at a time.
    """
    if body.name.partition(":")[0] == REPORT_CLAIM:
        raise errors.bad_request(f"the claim {body.name!r} is the API's own. Choose another name for the work.")
    holder = await ctx.store.envs.claim(run_id, body.name, body.holder, round(body.ttl * 1000))
    _LOG.debug(line("claim", run=run_id, name=body.name, holder=holder))
    return Claim(name=body.name, holder=holder)
