"""The journal of a run: metrics of its parts, the stream of events, the latest examples."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Final, TypeVar

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import Field, StringConstraints, model_validator
from redis.exceptions import RedisError

from gristmill import Example, MetricsRow, RunEvent
from gristmill.internal.metrics import MAX_TEXT
from gristmill_api import errors
from gristmill_api.access.permissions import Need
from gristmill_api.access.settings import Role
from gristmill_api.context import Ctx, Name, RequestModel, RunId
from gristmill_api.examples import example
from gristmill_api.http.body_limit import offload
from gristmill_api.settings import MAX_NUMBER
from gristmill_api.store import keys

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["journal"])

MAX_VALUES = 256
"""Metrics in one row, including nested groups."""
_TRAINER: Final = "trainer"
"""The source that only a trainer may report as."""
OWN_SOURCES: Final = frozenset({_TRAINER, "eval", "evaluate", "data.rows"})
"""Sources of trainer and environment, whose names no environment may have. Readers may ask for their rows before the
first one exists."""
_EVENTS_AT_ONCE = 256
_EVENTS_WAIT_S = 30.0
_MOST_IN_ID: Final = 2**64 - 1

Value = Annotated[float, Field(allow_inf_nan=False)] | Annotated[str, Field(max_length=MAX_TEXT)]
T = TypeVar("T")
# `additionalProperties` is false, because a pattern of names alone allows other names.
ByName = Annotated[
    dict[Annotated[str, StringConstraints(pattern=r"^[ -~]{1,128}$")], T],
    Field(max_length=MAX_VALUES, json_schema_extra={"additionalProperties": False}),
]
Source = Annotated[Name, Path()]


class Row(RequestModel):
    source: Name
    """The process that measured: "trainer", or an environment's id."""
    step: Annotated[int, Field(ge=0, le=MAX_NUMBER)]
    values: ByName[Value | ByName[Value]]
    """Numbers and strings by metric name."""

    @model_validator(mode="after")
    def _bounded(self) -> Row:
        count = sum(len(value) if isinstance(value, dict) else 1 for value in self.values.values())
        if count > MAX_VALUES:
            raise ValueError(f"a row has at most {MAX_VALUES} values, with its groups' values; this row has {count}")
        return self


async def _existing(ctx: Ctx, run_id: RunId) -> str:
    """Returns the id of a run that exists."""
    return (await ctx.store.runs.record(run_id)).run_id


ExistingRun = Annotated[str, Depends(_existing)]


async def _after(
    ctx: Ctx,
    run_id: ExistingRun,
    last_event_id: Annotated[str | None, Header(pattern=r"^\d{1,20}-\d{1,20}$")] = None,
) -> str:
    """Returns the id after which the client needs events. The id is read before the response starts."""
    if last_event_id:
        numbers = [int(part) for part in last_event_id.split("-")]
        if max(numbers) > _MOST_IN_ID or min(numbers) == _MOST_IN_ID:  # Redis refuses to read after the largest id.
            raise errors.bad_request(f"Last-Event-ID {last_event_id} is not below {_MOST_IN_ID}-{_MOST_IN_ID}.")
    return last_event_id or await ctx.store.journal.newest_event(run_id)


@router.post("/metrics", status_code=204)
async def measure(ctx: Ctx, request: Request, run_id: RunId, body: Row) -> None:
    """Store one row of metrics. Another row of the same source and step replaces it, so a retry counts once.

    The source `trainer` is for the trainer's role. With tokens, an environment's row under the name of a registered
    environment needs its word, and a row of `eval` or `data.rows` the word of any registered environment. A run has 64
    sources (409 too_many_sources), and a row 32 KiB of JSON (413 too_large)."""
    role = request.scope.get("role")
    if body.source == _TRAINER and role is Role.ENV:
        raise errors.forbidden(f"a row of metrics of the source {_TRAINER!r}", Need.TRAINER.value, role)
    await ctx.store.journal.record_metrics(run_id, MetricsRow(**body.model_dump()))


@router.get("/metrics")
async def sources(ctx: Ctx, run_id: ExistingRun) -> list[str]:
    """The sources that reported metrics."""
    return await ctx.store.journal.sources(run_id)


@router.get("/metrics/{source}", response_model=list[MetricsRow])
async def rows(
    ctx: Ctx,
    run_id: ExistingRun,
    source: Source,
    after_step: Annotated[int, Query(ge=-1, le=MAX_NUMBER)] = -1,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """A source's rows of the steps after `after_step`, in order. The newest 10,000 are kept.

    A source that never reported is an error, 404 source_missing, except a source of Gristmill's own services."""
    metrics = await ctx.store.journal.rows(run_id, source, after_step, limit)
    if not metrics and source not in OWN_SOURCES:
        sources = await ctx.store.journal.sources(run_id)
        if source not in sources:
            raise errors.source_missing(run_id, source, sources)
    # As they are stored: to parse 10,000 rows and write them again takes the event loop 0.4 s.
    begin = b'{"source":%b,' % json.dumps(source).encode()
    return Response(b"[%b]" % b",".join(begin + row[1:] for row in metrics), media_type="application/json")


@router.get("/events", response_class=EventSourceResponse)
async def events(
    ctx: Ctx, request: Request, run_id: ExistingRun, after: Annotated[str, Depends(_after)]
) -> AsyncIterator[ServerSentEvent]:
    """Events of the run from now on, or since `Last-Event-ID`, as server-sent events of `gristmill.RunEvent`.

    About the newest 1024 are kept; a client that was away longer misses the older ones.
    """

    async def attempt() -> list[RunEvent] | None:
        new_events = await ctx.store.journal.events(run_id, after, _EVENTS_AT_ONCE)
        return new_events if new_events or not await ctx.store.runs.exists(run_id) else None

    # A client that loses its connection before the first event continues after this id.
    yield ServerSentEvent(id=after)
    while not ctx.notifications.closed:
        topic = keys.events_topic(run_id)
        try:
            found = await ctx.notifications.poll(topic, attempt, _EVENTS_WAIT_S, request.is_disconnected)
        except RedisError as error:
            if errors.from_redis(error) is None:
                raise
            return  # The status 200 is sent. The client connects again and receives 503 while Redis is away.
        if found == [] or (found is None and await request.is_disconnected()):
            return
        for event in found or ():
            after = event.id
            yield ServerSentEvent(id=event.id, event=event.kind, data=event)


@router.get("/examples", response_model=list[Example])
async def examples(ctx: Ctx, run_id: ExistingRun, limit: Annotated[int, Query(ge=1, le=8)] = 1) -> Response:
    """The beginnings of the groups submitted last, newest first; also of those that were trained meanwhile."""
    texts = [await offload(len(body), example, body) async for _, body in ctx.store.journal.examples(run_id, limit)]
    return Response(b"[" + b",".join(texts) + b"]", media_type="application/json")
