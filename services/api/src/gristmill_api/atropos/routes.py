"""The routes of Atropos' protocol: the trainer's side, the environments' side, and the groups between them."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Depends, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from redis.exceptions import RedisError

from gristmill.internal.logs import line
from gristmill_api.atropos import env_status, parse
from gristmill_api.atropos.backpressure import Backpressure
from gristmill_api.atropos.conversion import SubmittedGroup
from gristmill_api.atropos.delivery import Deliveries, Delivery, parts
from gristmill_api.atropos.messages import EnvIdentifier, Groups, Mismatch, RegisterEnv, Registration, ScoredData
from gristmill_api.atropos.queue import WORK_OF_A_GROUP, Queue, new_id
from gristmill_api.context import Context
from gristmill_api.errors import ApiProblem
from gristmill_api.http.body_limit import UNCOUNTED, offload, reserve_inflated
from gristmill_api.http.content_coding import GZIP_MINIMUM_SIZE, InvalidGzip, accepts_gzip, gunzip, gzip_response
from gristmill_api.http.error_handlers import ATROPOS_REFUSALS, ErrorFormat, refusal_code
from gristmill_api.http.fast_route import FastRoute, Handler, NeedsSlowPath, fast_path

_LOG = logging.getLogger(__name__)
_SUBMITS: Final = ("/scored_data", "/scored_data_list")
_REPORTS: Final = 4096
"""Reports that are remembered. Clients choose the numbers of environments."""


class AtroposContext:
    def __init__(self, ctx: Context, run_id: str) -> None:
        self.metrics = ctx.metrics
        self.queue = Queue(ctx.store, ctx.limits, run_id)
        self.backpressure = Backpressure(ctx, run_id)
        self.deliveries = Deliveries(self.queue, self.backpressure)
        self._left_out: set[tuple[int | None, str]] = set()

    def report_left_out(self, group: SubmittedGroup) -> None:
        """Log the fields that a stored group lacks because they did not fit, once per environment and field."""
        new = [name for name in group.left_out if (group.env_id, name) not in self._left_out]
        if not new:
            return
        if len(self._left_out) > _REPORTS:
            self._left_out.clear()
        self._left_out |= {(group.env_id, name) for name in new}
        why = "their lengths or values do not fit the tokens; groups are stored without them and counted in the status"
        _LOG.warning(line("left_out", run=self.queue.run_id, env=group.env_id, fields=",".join(new), why=why))


# async, although it awaits nothing: FastAPI runs a plain function in a thread.
async def _atropos_context(request: Request) -> Any:
    return request.app.state.atropos


AtroposCtx = Annotated[AtroposContext, Depends(_atropos_context)]


class AtroposRoute(FastRoute):
    """A route at the API's root: gzip in both directions, and errors in the format that Atropos' clients read."""

    error_format = ErrorFormat.ATROPOS

    def wrap(self, handler: Handler) -> Handler:
        submits = self.path in _SUBMITS

        async def handle(request: Request) -> Response:
            try:
                return await gzip_response(request, await handler(await _inflated(request)))
            except (ApiProblem, RedisError, RequestValidationError, HTTPException, InvalidGzip) as error:
                if submits:
                    # A body that cannot be read counts as one group.
                    groups = getattr(request.state, "groups", 1)
                    request.app.state.atropos.metrics.submits.labels(refusal_code(error)).inc(groups)
                raise

        return handle


class _InflatedRequest(Request):
    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body


async def _inflated(request: Request) -> Request:
    if "gzip" not in request.headers.get("content-encoding", "").lower():
        return request
    limit = request.app.state.context.limits.max_body_bytes
    reserve = functools.partial(reserve_inflated, request.scope)
    return _InflatedRequest(request, await gunzip(await request.body(), limit, reserve))


router = APIRouter(tags=["atropos"], route_class=AtroposRoute, responses=ATROPOS_REFUSALS)

# One of Atropos' plugins asks for a batch before it registers, and reads the key `batch`.
_UNREGISTERED = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}

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


@router.get("/")
async def root() -> dict[str, str]:
    return {"message": "AtroposLib API"}


@router.post("/register")
async def register(ctx: AtroposCtx, request: Request, registration: Registration) -> dict[str, int]:
    """Register the trainer and the settings of its run. While a trainer is registered, another call changes nothing."""
    await ctx.backpressure.retry(lambda: ctx.queue.register(registration), request.is_disconnected)
    _LOG.info(line("register", run=ctx.queue.run_id, batch_size=registration.batch_size))
    return {"uuid": uuid.uuid4().int}


@router.get("/wandb_info")
async def wandb_info(ctx: AtroposCtx, request: Request) -> dict[str, str | None]:
    trainer = await ctx.backpressure.retry(ctx.queue.trainer, request.is_disconnected)
    if trainer is None:
        return {"group": None, "project": None}
    return {"group": trainer.registration["wandb_group"], "project": trainer.registration["wandb_project"]}


@router.get("/info")
async def info(ctx: AtroposCtx, request: Request) -> dict[str, int]:
    trainer = await ctx.backpressure.retry(ctx.queue.trainer, request.is_disconnected)
    if trainer is None:
        return {"batch_size": -1, "max_token_len": -1}
    return {name: int(trainer.registration[name]) for name in ("batch_size", "max_token_len")}


@router.get("/status")
async def status(ctx: AtroposCtx, request: Request) -> dict[str, int]:
    """The step counts the batches that were delivered."""
    await ctx.deliveries.settled()
    trainer = await ctx.backpressure.retry(ctx.queue.trainer, request.is_disconnected)
    if trainer is None:
        return {"current_step": 0, "queue_size": 0}
    return {"current_step": trainer.step, "queue_size": trainer.queued}


@router.get("/batch", response_class=JSONResponse, response_model=dict[str, Any])
@fast_path()
async def batch(ctx: AtroposCtx, request: Request) -> Response:
    """Exactly batch_size sequences in whole groups, or null. A batch counts as delivered once all of it was sent."""
    batch_id = new_id("atropos")
    leased = await ctx.backpressure.retry(lambda: ctx.queue.lease(batch_id), request.is_disconnected)
    if leased is None:
        return JSONResponse(_UNREGISTERED)
    groups = leased.groups
    if leased.dead:
        why = "they can be part of no batch; GET /v1/runs/.../dead lists the reasons"
        _LOG.warning(line("dead", run=ctx.queue.run_id, groups=leased.dead, why=why))
    if not groups:
        return JSONResponse({"batch": None})
    first, *others = parts(groups)
    texts = await ctx.queue.texts(batch_id, first)
    is_large = bool(others) or sum(map(len, texts)) >= GZIP_MINIMUM_SIZE
    return Delivery(ctx.deliveries, batch_id, groups, texts, others, accepts_gzip(request) and is_large)


@router.get("/reset_data", response_class=PlainTextResponse)
async def reset_data(ctx: AtroposCtx, request: Request) -> str:
    """Forget the registrations and drop the queue. Trained groups and dead letters stay as they are."""
    await ctx.deliveries.settled()
    await ctx.backpressure.retry(ctx.queue.reset, request.is_disconnected)
    _LOG.info(line("reset", run=ctx.queue.run_id))
    return "Reset successful"


@router.post("/register-env")
async def register_env(ctx: AtroposCtx, request: Request, register_env: RegisterEnv) -> dict[str, Any]:
    """Join the trainer's run. The response has the environment's number and the training step. Before the trainer's
    first batch the response says to wait."""
    await ctx.deliveries.settled()
    env = await ctx.backpressure.retry(lambda: ctx.queue.register_env(register_env), request.is_disconnected)
    if env is None:
        return {"status": "wait for trainer to start"}
    name = f"{register_env.desired_name}_{env.namesakes}"
    _LOG.info(line("env", run=ctx.queue.run_id, number=env.number, name=name, state="registered"))
    return {
        "status": "success",
        "env_id": env.number,
        "wandb_name": name,
        "checkpoint_dir": env.trainer["checkpoint_dir"],
        "starting_step": int(env.trainer["step"]),
        "checkpoint_interval": int(env.trainer["save_checkpoint_interval"]),
        "num_steps": int(env.trainer["num_steps"]),
    }


@router.post("/disconnect-env")
async def disconnect_env(ctx: AtroposCtx, request: Request, disconnect_env: EnvIdentifier) -> dict[str, str]:
    """Leave the run: the environment's weight and its share of each batch no longer count."""
    number = disconnect_env.env_id
    if await ctx.backpressure.retry(lambda: ctx.queue.disconnect(number), request.is_disconnected):
        _LOG.info(line("env", run=ctx.queue.run_id, number=number, state="disconnected"))
        return {"status": "success"}
    return {"status": "failure", "error": f"no environment has the number {number}"}


@router.get("/status-env")
async def status_env(ctx: AtroposCtx, request: Request, env: EnvIdentifier) -> dict[str, int | float]:
    """The length of the queue, in groups of the environment's size. The environment's number is in the body, although
    this is a GET."""
    await ctx.deliveries.settled()
    view = await ctx.backpressure.retry(lambda: ctx.queue.env(env.env_id), request.is_disconnected)
    if view is None:
        raise HTTPException(404, f"no environment has the number {env.env_id}: register again (POST /register-env)")
    return env_status.status(view)


async def _received(ctx: AtroposContext, request: Request, group: SubmittedGroup) -> Response:
    (buffered,) = await _store(ctx, request, [group])
    return JSONResponse({"status": "received"} if buffered is None else {"status": "buffered", "buffer_size": buffered})


async def _received_list(ctx: AtroposContext, request: Request, groups: Sequence[SubmittedGroup]) -> Response:
    sizes = [size for size in await _store(ctx, request, groups) if size is not None]
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(groups)}
    if sizes:
        answer |= {"buffered": len(sizes), "last_buffer_size": sizes[-1]}
    return JSONResponse(answer)


def _fast_reader(
    read: Callable[[bytes], Any], read_slowly: Callable[[bytes], Any], received: Callable[..., Awaitable[Response]]
) -> Handler:
    """Returns a handler that reads groups from the body's bytes. FastAPI takes more time for a small group than all
    other work on the group."""

    async def handle(request: Request) -> Response:
        body = await request.body()
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not re.fullmatch(r"application/(.+\+)?json", media_type):
            raise NeedsSlowPath
        try:
            work = max(len(body), WORK_OF_A_GROUP * body.count(b'"tokens"'))
            groups = await offload(work, read, body)
        except Mismatch as error:
            raise parse.invalid(error) from error
        except NeedsSlowPath:
            if len(body) <= UNCOUNTED:
                raise
            # Not on the threads of `offload`: for this body, one of them would be busy ten times as long.
            groups = await asyncio.to_thread(read_slowly, body)
        return await received(request.app.state.atropos, request, groups)

    return handle


@router.post("/scored_data", response_model=dict[str, Any])
@fast_path(_fast_reader(parse.read_one, parse.read_one_slowly, _received))
async def scored_data(ctx: AtroposCtx, request: Request, scored_data: ScoredData) -> Response:
    """Store a group. If its size is not its environment's group size, the group waits in a buffer until the sizes in
    the buffer add up to the group size."""
    return await _received(ctx, request, parse.read_messages([scored_data])[0])


@router.post("/scored_data_list", response_model=dict[str, Any])
@fast_path(_fast_reader(parse.read_list, parse.read_list_slowly, _received_list))
async def scored_data_list(ctx: AtroposCtx, request: Request, scored_data_list: Annotated[Groups, Body()]) -> Response:
    """Store all groups. If one group is wrong or the store has no room, store none of them."""
    return await _received_list(ctx, request, parse.read_messages(scored_data_list, in_list=True))


@router.get("/latest_example", response_model=dict[str, Any])
async def latest_example(ctx: AtroposCtx, request: Request) -> Response:
    """The group that was queued last. The example outlives the group's training and a reset."""
    example = await ctx.backpressure.retry(ctx.queue.latest, request.is_disconnected)
    if example is None:
        return JSONResponse(_NO_EXAMPLE)
    return Response(example, media_type="application/json")


async def _store(ctx: AtroposContext, request: Request, groups: Sequence[SubmittedGroup]) -> list[int | None]:
    receipt = new_id("receipt")
    size = sum(group.size for group in groups)
    submit = functools.partial(ctx.queue.submit, receipt, groups)
    request.state.groups = len(groups)
    sizes = await ctx.backpressure.retry(submit, request.is_disconnected, size)
    for group, buffered in zip(groups, sizes, strict=True):
        ctx.metrics.submits.labels("stored").inc()
        ctx.report_left_out(group)
        state = "ready" if buffered is None else "buffered"
        _LOG.info(
            line("submit", run=ctx.queue.run_id, env=group.env_id, sequences=group.sequences, bytes=group.size,
                 state=state)
        )  # fmt: skip
    return sizes
