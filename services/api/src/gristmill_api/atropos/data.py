"""Groups come in here, and the latest can be looked at."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from gristmill.logs import line
from gristmill_api.atropos import scored
from gristmill_api.atropos.door import AtDoor, Door
from gristmill_api.atropos.lengths import Mismatch
from gristmill_api.atropos.messages import Groups, ScoredData
from gristmill_api.atropos.queue import new_id
from gristmill_api.atropos.scored import Irregular, Scored
from gristmill_api.atropos.speech import REFUSALS, AtroposRoute, spoken
from gristmill_api.atropos.translate import as_json
from gristmill_api.offload import IN_LOOP, offload

_LOG = logging.getLogger(__name__)

_NO_EXAMPLE: dict[str, list[Any]] = {
    name: []
    for name in (
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    )
}


async def _received(door: Door, request: Request, group: Scored) -> Response:
    (buffered,) = await _store(door, request, [group])
    return JSONResponse({"status": "received"} if buffered is None else {"status": "buffered", "buffer_size": buffered})


async def _received_list(door: Door, request: Request, groups: Sequence[Scored]) -> Response:
    sizes = [size for size in await _store(door, request, groups) if size is not None]
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(groups)}
    if sizes:
        answer |= {"buffered": len(sizes), "last_buffer_size": sizes[-1]}
    return JSONResponse(answer)


class _FastRoute(AtroposRoute):
    """The fast way first: FastAPI costs a small group more than all the rest. A body that the fast way cannot make
    sense of takes the slow way, which is FastAPI's.

    Put the routes into the application as they are: a router that is included wraps its routes in new ones.
    """

    read: Callable[[bytes], Any]
    read_slowly: Callable[[bytes], Any]
    received: Callable[..., Awaitable[Response]]

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        slow = AsyncExitStackMiddleware(self.app)
        read, read_slowly, received = type(self).read, type(self).read_slowly, type(self).received

        async def fast(request: Request) -> Response:
            body = await request.body()
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise Irregular
            try:
                groups = await offload(len(body), read, body)
            except Mismatch as error:
                raise _invalid(error) from error
            except Irregular:
                if len(body) <= IN_LOOP:
                    raise
                groups = await offload(len(body), read_slowly, body)
            return await received(request.app.state.atropos, request, groups)

        async def either(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive, send)
            try:
                response = await spoken(request, fast)
            except Irregular:
                await slow(scope, _again(await request.body(), receive), send)
            else:
                await response(scope, receive, send)

        self.app = either


class _OneRoute(_FastRoute):
    read = staticmethod(scored.read_one)
    read_slowly = staticmethod(scored.read_one_slowly)
    received = staticmethod(_received)


class _ListRoute(_FastRoute):
    read = staticmethod(scored.read_list)
    read_slowly = staticmethod(scored.read_list_slowly)
    received = staticmethod(_received_list)


def _again(body: bytes, receive: Receive) -> Receive:
    """What a request's body was read from, from its start."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        return next(messages, None) or await receive()

    return replay


router = APIRouter(tags=["atropos"], route_class=AtroposRoute)
_ones = APIRouter(tags=["atropos"], route_class=_OneRoute, responses=REFUSALS)
_lists = APIRouter(tags=["atropos"], route_class=_ListRoute, responses=REFUSALS)


@_ones.post("/scored_data", response_model=dict[str, Any])
async def scored_data(door: AtDoor, request: Request, scored_data: ScoredData) -> Response:
    """Store a group. One whose size is not its environment's waits in a buffer until some sum to that size."""
    try:
        group = scored.from_message(scored_data)
    except Mismatch as error:
        raise _invalid(error) from error
    return await _received(door, request, group)


@_lists.post("/scored_data_list", response_model=dict[str, Any])
async def scored_data_list(door: AtDoor, request: Request, scored_data_list: Annotated[Groups, Body()]) -> Response:
    """Store groups, all of them or, when one is wrong or there is no room, none."""
    groups: list[Scored] = []
    for index, message in enumerate(scored_data_list):
        try:
            groups.append(scored.from_message(message))
        except Mismatch as error:
            raise _invalid(error, index) from error
    return await _received_list(door, request, groups)


@router.get("/latest_example", response_model=dict[str, Any])
async def latest_example(door: AtDoor, request: Request) -> Response:
    """The group that was queued last; it outlives its training and a reset."""
    found = await door.patience.insist(door.queue.latest, request.is_disconnected)
    if found is None:
        return JSONResponse(_NO_EXAMPLE)
    return Response(await as_json(found), media_type="application/json")


hot = [*_ones.routes, *_lists.routes]
"""Routes to be put into the application as they are."""


async def _store(door: Door, request: Request, groups: Sequence[Scored]) -> list[int | None]:
    receipt = new_id("receipt")
    size = sum(len(group.text) for group in groups)
    submit = functools.partial(door.queue.submit, receipt, groups)
    sizes = await door.patience.insist(submit, request.is_disconnected, size)
    for group, buffered in zip(groups, sizes, strict=True):
        door.metrics.submits.labels("stored").inc()
        door.report_left_out(group)
        state = "ready" if buffered is None else "buffered"
        _LOG.info(
            line("submit", run=door.queue.run_id, env=group.env_id, sequences=group.sequences, bytes=len(group.text),
                 state=state)
        )  # fmt: skip
    return sizes


def _invalid(mismatch: Mismatch, *at: int) -> RequestValidationError:
    """As FastAPI would say it."""
    told = {"type": "value_error", "loc": ("body", *at, *mismatch.where), "msg": f"Value error, {mismatch}"}
    return RequestValidationError([told])
