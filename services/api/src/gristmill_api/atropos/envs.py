"""The environments' side: register, say goodbye, ask how much to generate."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter, HTTPException, Request

from gristmill.logs import line
from gristmill_api.atropos import figures
from gristmill_api.atropos.door import AtDoor
from gristmill_api.atropos.messages import EnvIdentifier, RegisterEnv
from gristmill_api.atropos.speech import AtroposRoute

_LOG = logging.getLogger(__name__)
router = APIRouter(tags=["atropos"], route_class=AtroposRoute)


@router.post("/register-env")
async def register_env(door: AtDoor, request: Request, register_env: RegisterEnv) -> dict[str, Any]:
    """Join the trainer's run: the environment's number, and where training is. Before its first batch: wait."""
    await door.deliveries.settled()
    env = await door.patience.insist(lambda: door.queue.register_env(register_env), request.is_disconnected)
    if env is None:
        return {"status": "wait for trainer to start"}
    name = f"{register_env.desired_name}_{env.namesakes}"
    _LOG.info(line("env", run=door.queue.run_id, number=env.number, name=name, state="registered"))
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
async def disconnect_env(door: AtDoor, request: Request, disconnect_env: EnvIdentifier) -> dict[str, str]:
    """Count no more: neither its weight nor its share of a batch."""
    number = disconnect_env.env_id
    if await door.patience.insist(lambda: door.queue.disconnect(number), request.is_disconnected):
        _LOG.info(line("env", run=door.queue.run_id, number=number, state="disconnected"))
        return {"status": "success"}
    return {"status": "failure", "error": f"no environment has the number {number}"}


@router.get("/status-env")
async def status_env(door: AtDoor, request: Request, env: EnvIdentifier) -> dict[str, int | float]:
    """How much is waiting, by the environment's own measure. The question is in the body, although this is a GET."""
    await door.deliveries.settled()
    view = await door.patience.insist(lambda: door.queue.env(env.env_id), request.is_disconnected)
    if view is None:
        raise HTTPException(404, f"no environment has the number {env.env_id}: register again (POST /register-env)")
    return figures.status(view)
