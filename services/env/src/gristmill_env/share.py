"""A share of its own for one process of a run: `inference_weight` of the permits, `min_batch_allocation` of batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from gristmill import ApiError, Client, GristmillError
from gristmill_env.settings import EnvConfig

logger = logging.getLogger(__name__)

# Seconds. The API takes an environment for dead after 60 of silence; two beats may be lost.
_BEAT = 15.0
_GOODBYE = 5.0


@contextlib.asynccontextmanager
async def registered(
    api: Client, run_id: str, env_id: str, config: EnvConfig, *, beat: float = _BEAT
) -> AsyncIterator[None]:
    """Hold the share that the configuration asks for, and give it back at the end. Asked for none, do nothing.

    `env_id`: the name under which the process holds permits. Its heart beats every `beat` seconds, for a process
    whose workers are all busy asks for no permits, and would count as dead.
    """
    if config.inference_weight is None and config.min_batch_allocation is None:
        yield
        return
    await api.register_env(run_id, env_id, config.inference_weight, config.min_batch_allocation)
    heart = asyncio.create_task(_beat(api, run_id, env_id, config, beat))
    try:
        yield
    finally:
        heart.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await heart
        try:
            async with asyncio.timeout(_GOODBYE):
                await api.leave_env(run_id, env_id)
        except (TimeoutError, GristmillError) as error:
            logger.warning(
                "the share of %s could not be given back (%s); it ends by itself", env_id, error or "no answer"
            )


async def _beat(api: Client, run_id: str, env_id: str, config: EnvConfig, every: float) -> None:
    while True:
        await asyncio.sleep(every)
        try:
            await _tell(api, run_id, env_id, config)
        except GristmillError as error:  # not the worker's end: its own calls say whether the API can be done without
            logger.warning("the API was not told that %s lives: %s", env_id, error)


async def _tell(api: Client, run_id: str, env_id: str, config: EnvConfig) -> None:
    try:
        await api.heartbeat_env(run_id, env_id)
    except ApiError as error:
        if error.code != "env_missing":
            raise
        await api.register_env(run_id, env_id, config.inference_weight, config.min_batch_allocation)
