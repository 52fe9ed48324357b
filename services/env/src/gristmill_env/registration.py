"""One process' registration with its run: its name, its heartbeat, its share, and its number of rows.

A run keeps its stack and its settings only while it has a live environment. Every process therefore registers, and
unregisters when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections.abc import AsyncIterator

from gristmill import ApiError, Client, GristmillError
from gristmill_env.settings import EnvConfig

logger = logging.getLogger(__name__)

ROWS = "data.rows"
"""Source of the metrics row at step 0 that holds the number of rows."""
# Seconds. The API considers an environment dead after 60 s without a heartbeat; two heartbeats may be lost.
_BEAT = 15.0
_GOODBYE = 5.0


def holder_name() -> str:
    """Returns a name that is unique among running processes. A restarted container keeps its name and its permits."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100]
    return f"{host}-{os.getpid()}"


@contextlib.asynccontextmanager
async def registered(
    api: Client, run_id: str, env_id: str, config: EnvConfig, *, beat: float = _BEAT
) -> AsyncIterator[None]:
    """Registers the process with the configured shares (`inference_weight` of the permits, `min_batch_allocation`
    of batches), and unregisters the process at the end.

    `env_id`: the name under which the process holds permits. A heartbeat is sent every `beat` seconds, because a
    process whose workers are all busy requests no permits, and would count as dead.
    """
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
                "%s could not be unregistered (%s); the API counts it as alive for a minute",
                env_id,
                error or "no answer",
            )


async def _beat(api: Client, run_id: str, env_id: str, config: EnvConfig, every: float) -> None:
    while True:
        await asyncio.sleep(every)
        try:
            await _renew_registration(api, run_id, env_id, config)
        except GristmillError as error:  # The worker's own calls decide whether the process can continue.
            logger.warning("the heartbeat of %s failed: %s", env_id, error)


async def _renew_registration(api: Client, run_id: str, env_id: str, config: EnvConfig) -> None:
    try:
        await api.heartbeat_env(run_id, env_id)
    except ApiError as error:
        if error.code != "env_missing":
            raise
        await api.register_env(run_id, env_id, config.inference_weight, config.min_batch_allocation)


async def record_row_count(api: Client, run_id: str, label: str, rows: int) -> None:
    """Records the number with the run; warns if the number was different before. `label`: names the data set."""
    before = next((int(row.values["rows"]) for row in await api.metrics(run_id, ROWS)), None)
    if before == rows:
        return
    if before is not None:
        logger.warning(
            "%s has %d rows; it had %d when run %s was last served. The order of the rows is computed from their "
            "number, so from here on some come again or are left out of their epoch; put the old data back, or give "
            "the run with the new ones another name",
            label,
            rows,
            before,
            run_id,
        )
    await api.report_metrics(run_id, ROWS, 0, {"rows": rows})
