"""The trainer's side: register, draw batches, look how far it is, start over."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from gristmill.logs import line
from gristmill_api.atropos.deflate import MINIMUM_SIZE, accepted
from gristmill_api.atropos.delivery import Delivery, parts
from gristmill_api.atropos.door import AtDoor
from gristmill_api.atropos.messages import Registration
from gristmill_api.atropos.queue import new_id
from gristmill_api.atropos.speech import REFUSALS, AtroposRoute, DirectRoute

_LOG = logging.getLogger(__name__)
router = APIRouter(tags=["atropos"], route_class=AtroposRoute)
_direct = APIRouter(tags=["atropos"], route_class=DirectRoute, responses=REFUSALS)

# One of Atropos' plugins asks for a batch before it registers, and looks for the key `batch`.
_UNREGISTERED = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}


@router.get("/")
async def root() -> dict[str, str]:
    return {"message": "AtroposLib API"}


@router.post("/register")
async def register(door: AtDoor, request: Request, registration: Registration) -> dict[str, int]:
    """Say what the run is. While one is registered, another changes nothing."""
    await door.patience.insist(lambda: door.queue.register(registration), request.is_disconnected)
    _LOG.info(line("register", run=door.queue.run_id, batch_size=registration.batch_size))
    return {"uuid": uuid.uuid4().int}


@router.get("/wandb_info")
async def wandb_info(door: AtDoor, request: Request) -> dict[str, str | None]:
    trainer = await door.patience.insist(door.queue.trainer, request.is_disconnected)
    if trainer is None:
        return {"group": None, "project": None}
    return {"group": trainer.registration["wandb_group"], "project": trainer.registration["wandb_project"]}


@router.get("/info")
async def info(door: AtDoor, request: Request) -> dict[str, int]:
    trainer = await door.patience.insist(door.queue.trainer, request.is_disconnected)
    if trainer is None:
        return {"batch_size": -1, "max_token_len": -1}
    return {name: int(trainer.registration[name]) for name in ("batch_size", "max_token_len")}


@router.get("/status")
async def status(door: AtDoor, request: Request) -> dict[str, int]:
    """The step is that of the batches delivered."""
    await door.deliveries.settled()
    trainer = await door.patience.insist(door.queue.trainer, request.is_disconnected)
    if trainer is None:
        return {"current_step": 0, "queue_size": 0}
    return {"current_step": trainer.step, "queue_size": trainer.queued}


@_direct.get("/batch", response_class=JSONResponse, response_model=dict[str, Any])
async def batch(door: AtDoor, request: Request) -> Response:
    """Exactly batch_size sequences in whole groups, or null. It counts as delivered when it was sent whole."""
    batch_id = new_id("atropos")
    found = await door.patience.insist(lambda: door.queue.lend(batch_id), request.is_disconnected)
    if found is None:
        return JSONResponse(_UNREGISTERED)
    lent, set_aside = found
    if set_aside:
        why = "they can be part of no batch; GET /v1/runs/.../dead tells each one's reason"
        _LOG.warning(line("dead", run=door.queue.run_id, groups=set_aside, why=why))
    if lent is None:
        return JSONResponse({"batch": None})
    first = await door.queue.payloads(batch_id, parts(lent)[0])
    gzip = accepted(request) and sum(group.size for group in lent) >= MINIMUM_SIZE
    return Delivery(door.deliveries, batch_id, lent, first, gzip)


@router.get("/reset_data", response_class=PlainTextResponse)
async def reset_data(door: AtDoor, request: Request) -> str:
    """Forget the registrations and drop the queue. What was trained or is dead stays as it is."""
    await door.deliveries.settled()
    await door.patience.insist(door.queue.reset, request.is_disconnected)
    _LOG.info(line("reset", run=door.queue.run_id))
    return "Reset successful"


hot = _direct.routes
"""Routes to be put into the application as they are."""
