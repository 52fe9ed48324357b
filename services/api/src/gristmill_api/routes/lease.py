"""The trainer's side of the queue: lease a batch, extend the lease, ack or nack the batch."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ConfigDict, Field, JsonValue, model_validator

from gristmill import BATCH_MEDIA_TYPE, Protocol, RunRecord
from gristmill.internal.logs import line
from gristmill_api import errors
from gristmill_api.context import Context, Ctx, Name, RequestModel, RunId
from gristmill_api.http import framing
from gristmill_api.http.fast_route import FastRoute, fast_path
from gristmill_api.settings import MAX_NUMBER
from gristmill_api.store import LeasedGroup, LeaseSize, keys

_LOG = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/runs/{run_id}", tags=["lease"], route_class=FastRoute)


def _only(unit: str) -> dict[str, JsonValue]:
    return {"required": [unit], "properties": {unit: {"type": "integer"}}}


class Lease(RequestModel):
    """Ask for a number of `groups` or, in a run of Atropos' environments, of `sequences`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_only("groups"), _only("sequences")]})

    incarnation: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    batch_id: Name
    """Chosen by the trainer. A repeated call with the same id, after a lost answer, returns the same batch."""
    groups: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Exactly this many groups."""
    sequences: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Groups with exactly this many sequences together: for runs of Atropos' environments only."""
    wait: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds to wait until the batch is ready."""

    @model_validator(mode="after")
    def _one_amount(self) -> Lease:
        if (self.groups is None) == (self.sequences is None):
            raise ValueError("name one of groups and sequences")
        return self

    @property
    def amount(self) -> LeaseSize:
        if self.groups is not None:
            return LeaseSize("groups", self.groups)
        assert self.sequences is not None
        return LeaseSize("sequences", self.sequences)


class Batches(RequestModel):
    incarnation: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    batch_ids: Annotated[list[Name], Field(max_length=65536)]


class Nacked(RequestModel):
    groups: int
    """Groups that are ready again by this call."""


class Extended(RequestModel):
    extended: list[str]
    lost: list[str]


class Ack(RequestModel):
    acked: int
    """Batches acked by this call."""
    already: int
    """Batches an earlier call had acked."""
    groups: int
    """Groups that became trained by this call."""


@router.post(
    "/lease",
    response_class=Response,
    responses={
        200: {"content": {BATCH_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}},
        204: {"description": "Fewer groups are ready than were asked for."},
    },
)
@fast_path()
async def lease(ctx: Ctx, request: Request, run_id: RunId, body: Lease) -> Response:
    """Lease from the head of the queue, in submit order. The body is framed as `gristmill_api.http.framing` says.

    The header `Gristmill-Dead` counts the groups that became dead letters by the call.
    """
    if body.sequences is not None and (await ctx.store.runs.record(run_id)).protocol is Protocol.GRISTMILL:
        raise errors.lease_by_sequences(run_id)
    dead, may_fill = 0, False

    async def attempt() -> list[LeasedGroup] | None:
        nonlocal dead, may_fill
        batch = await ctx.store.queue.lease(run_id, body.incarnation, body.batch_id, body.amount)
        dead += batch.dead
        if not batch.groups and not may_fill:
            _refuse_too_many(await ctx.store.runs.record(run_id), body.groups)
            may_fill = True
        return batch.groups or None

    batch = await ctx.notifications.poll(
        keys.ready_topic(run_id), attempt, ctx.wait(body.wait), request.is_disconnected
    )
    if dead:
        _LOG.warning(line("lease", run=run_id, batch=body.batch_id, dead=dead))
    counted = {"Gristmill-Dead": str(dead)}
    if batch is None:
        return Response(status_code=204, headers=counted)
    # The first part is read before the answer starts, so that a Redis gone meanwhile is still a clean 503.
    answer = _Answer(ctx, run_id)
    parts = framing.parts(batch, lambda group: group.size)
    first = await answer.framed(parts[0], before=framing.array_header(len(batch)))
    _LOG.info(
        line("lease", run=run_id, batch=body.batch_id, incarnation=body.incarnation, groups=len(batch),
             bytes=sum(group.size for group in batch))
    )  # fmt: skip
    if len(parts) == 1:
        return Response(first, media_type=BATCH_MEDIA_TYPE, headers=counted)
    headers = {"Content-Length": str(framing.length([group.size for group in batch])), **counted}
    return StreamingResponse(answer.stream(first, parts[1:]), media_type=BATCH_MEDIA_TYPE, headers=headers)


def _refuse_too_many(run: RunRecord, groups: int | None) -> None:
    """Raises `lease_too_large` if the run's permits never let so many groups be ready."""
    if groups is None or run.protocol is not Protocol.GRISTMILL or run.groups_per_step is None:
        return
    most = run.groups_per_step * (1 + (run.max_staleness or 0))
    if groups > most:
        raise errors.lease_too_large(run.run_id, groups, most)


@router.post("/extend")
async def extend(ctx: Ctx, run_id: RunId, body: Batches) -> Extended:
    """Keep leases alive. `lost`: batches whose groups went to another lease."""
    lost = await ctx.store.queue.extend(run_id, body.incarnation, body.batch_ids)
    gone = frozenset(lost)
    return Extended(extended=[batch_id for batch_id in body.batch_ids if batch_id not in gone], lost=lost)


@router.post("/ack")
async def ack(ctx: Ctx, run_id: RunId, body: Batches) -> Ack:
    """A durable checkpoint covers these batches. 410 names lost batches; the others are acked."""
    done = await ctx.store.queue.ack(run_id, body.incarnation, body.batch_ids)
    _LOG.info(
        line("ack", run=run_id, incarnation=body.incarnation, batches=done.batches, already=done.already,
             groups=done.groups, lost=len(done.lost))
    )  # fmt: skip
    if done.lost:
        raise errors.lease_lost(run_id, done.lost)
    return Ack(acked=done.batches, already=done.already, groups=done.groups)


@router.post("/nack")
async def nack(ctx: Ctx, run_id: RunId, body: Batches) -> Nacked:
    """Give batches back at once: their groups are ready again, in their places. Unknown ids are ignored."""
    groups = await ctx.store.queue.nack(run_id, body.incarnation, body.batch_ids)
    _LOG.info(line("nack", run=run_id, incarnation=body.incarnation, batches=len(body.batch_ids), groups=groups))
    return Nacked(groups=groups)


class _Answer:
    """The body of a leased batch, with one part of it in memory at a time."""

    def __init__(self, ctx: Context, run_id: str) -> None:
        self._ctx = ctx
        self._run_id = run_id

    async def stream(self, first: bytes, parts: list[list[LeasedGroup]]) -> AsyncIterator[bytes]:
        """Yields the first part, then the others. Raises in the middle when Redis fails or the groups were acked
        meanwhile: the connection breaks short of its Content-Length, and the client asks again."""
        yield first
        for part in parts:
            yield await self.framed(part)

    async def framed(self, part: list[LeasedGroup], before: bytes = b"") -> bytes:
        """Returns the groups' bytes, each behind its header."""
        pieces = [before]
        bodies = await self._ctx.store.queue.payloads(self._run_id, [group.group_id for group in part])
        for group, body in zip(part, bodies, strict=True):
            if body is None:
                raise errors.lease_lost(self._run_id, [group.group_id])
            pieces += (framing.bin_header(len(body)), body)
        return b"".join(pieces)
