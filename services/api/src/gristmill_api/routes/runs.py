"""The run record: the environment opens a run, a trainer takes it, publishes versions and ends it."""

from __future__ import annotations

import functools
import logging
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, StringConstraints

from gristmill import RunRecord, RunStatus
from gristmill.internal.logs import line
from gristmill_api import errors
from gristmill_api.context import Ctx, Id, Name, RequestModel, RunId
from gristmill_api.settings import MAX_NUMBER
from gristmill_api.store import keys
from gristmill_api.store.runs import DEFAULT_STACK

_LOG = logging.getLogger(__name__)
router = APIRouter(prefix="/v1", tags=["runs"])


class CreateRun(RequestModel):
    run_id: Id
    env: dict[str, Any]
    """The environment's settings. An environment that joins the run must send the same."""
    group_size: Annotated[int, Field(ge=1, le=65536)]
    """Sequences a group."""
    stack: Name | None = DEFAULT_STACK
    """The stack (one model server and its trainer) that works on the run. It has one open run at a time; null: none."""


class Take(RequestModel):
    trainer: dict[str, Any]
    """The trainer's settings; batch_size, gradient_accumulation_steps, training_steps and max_staleness among them."""
    covered: Annotated[list[Id], Field(max_length=2**17)] = Field(default_factory=list)
    """Groups that the resumed checkpoint was trained on."""
    step: Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None = None
    """Optimizer steps that the resumed checkpoint has behind it, 0 without one. A trainer that goes back to an older
    checkpoint gets permits for the steps after it; null: it does not go back."""
    creation: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{0,64}$")] | None = None
    """`creation` of the run in which the resumed checkpoint was made. If the run was deleted and created again since,
    the call is refused (409 other_creation), because group ids start again in each creation."""
    taker: Id | None = None
    """A word of your choice for this call. Repeated with the same word, the call changes nothing and returns the same
    incarnation, as long as no other trainer has taken the run. Without it, each call is another incarnation."""


class Taken(RequestModel):
    incarnation: int
    record: RunRecord


class Version(RequestModel):
    incarnation: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    step: Annotated[int, Field(ge=0, le=MAX_NUMBER)]


class Incarnation(RequestModel):
    incarnation: Annotated[int, Field(ge=1, le=MAX_NUMBER)]


@router.post("/runs", responses={201: {"model": RunRecord}})
async def create_run(ctx: Ctx, body: CreateRun, response: Response) -> RunRecord:
    """Open a run (201), or join it with the same settings (200), which resumes a suspended run. Check `state`: the run
    may be finished.

    More `env.trainer.training_steps` extend a run. Other settings replace a run that has no finished step and no living
    environment (201), and are refused otherwise (409 config_differs). An open run of the stack is suspended if no
    environment of it is alive; otherwise this run is refused (409 run_open). docs/api.md has a table.

    `env.trainer` is an object, or absent (422 bad_config otherwise). Its keys belong to the trainer that takes the run,
    which refuses keys that a run may not set."""
    if not isinstance(body.env.get("trainer") or {}, dict):
        raise errors.bad_config(f"`trainer` of run {body.run_id}'s settings is not an object.")
    record, new = await ctx.store.runs.create(body.run_id, body.env, body.group_size, body.stack)
    if new:
        response.status_code = 201
        _LOG.info(line("run", run=record.run_id, state=record.state, group_size=record.group_size))
    return record


@router.get("/runs")
async def runs(
    ctx: Ctx,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[RunRecord]:
    """Runs, oldest first, from the one at `offset`. Fewer than `limit`: these are the last."""
    return await ctx.store.runs.all(offset, limit)


@router.get("/runs/{run_id}")
async def run(ctx: Ctx, run_id: RunId) -> RunRecord:
    return await ctx.store.runs.record(run_id)


@router.get("/open", response_model=RunRecord, responses={204: {"description": "No run is open."}})
async def open_run(
    ctx: Ctx,
    request: Request,
    stack: Name = DEFAULT_STACK,
    wait: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0,
) -> RunRecord | Response:
    """The open run of a stack; waits up to `wait` seconds for one."""
    attempt = functools.partial(ctx.store.runs.open_run, stack)
    record = await ctx.notifications.poll(keys.OPEN_TOPIC, attempt, ctx.wait(wait), request.is_disconnected)
    return record or Response(status_code=204)


@router.post("/runs/{run_id}/take")
async def take(ctx: Ctx, run_id: RunId, body: Take) -> Taken:
    """Become the run's trainer: older ones are fenced off, leased groups that `covered` does not name go back."""
    record = await ctx.store.runs.take(run_id, body.trainer, body.covered, body.step, body.creation, body.taker)
    _LOG.info(line("take", run=run_id, incarnation=record.incarnation, covered=len(body.covered)))
    return Taken(incarnation=record.incarnation, record=record)


@router.post("/runs/{run_id}/version")
async def version(ctx: Ctx, run_id: RunId, body: Version) -> RunRecord:
    """The model server now serves the weights after `step` steps."""
    record = await ctx.store.runs.record_version(run_id, body.incarnation, body.step)
    _LOG.info(line("version", run=run_id, version=record.version))
    return record


@router.post("/runs/{run_id}/finish")
async def finish(ctx: Ctx, run_id: RunId, body: Incarnation) -> RunRecord:
    """End the run. Environments learn that from their next request for permits."""
    record = await ctx.store.runs.finish(run_id, body.incarnation)
    _LOG.info(line("run", run=run_id, state=record.state, version=record.version))
    return record


@router.post("/runs/{run_id}/close")
async def close(ctx: Ctx, run_id: RunId) -> RunRecord:
    """End the run by hand, so that another may begin: its environments and its trainer stop with their next request."""
    record = await ctx.store.runs.close(run_id)
    _LOG.info(line("run", run=run_id, state=record.state, version=record.version, by="an operator"))
    return record


@router.delete("/runs/{run_id}", status_code=204)
async def delete(ctx: Ctx, run_id: RunId) -> None:
    """Delete a finished run and all that the store holds of it. Its folder (checkpoints, archive) stays."""
    await ctx.store.runs.delete(run_id)
    _LOG.info(line("delete", run=run_id))


@router.get("/runs/{run_id}/status")
async def status(ctx: Ctx, run_id: RunId) -> RunStatus:
    """Counts, cheap however long the queue is."""
    return await ctx.store.runs.status(run_id)
