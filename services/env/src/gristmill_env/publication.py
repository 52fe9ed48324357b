"""Whether the model server serves weights of this run, and the wait until it does."""

from __future__ import annotations

import asyncio
import logging

from gristmill import Client
from gristmill_env.inference import ModelServer
from gristmill_env.versions import is_version

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0


class Publication:
    """What a run's trainer does with the model server."""

    def __init__(self, api: Client, run_id: str, server: ModelServer) -> None:
        self._api = api
        self._run_id = run_id
        self._server = server
        self._asking = asyncio.Lock()
        self._happens: bool | None = None

    async def happens(self) -> bool:
        """Whether the trainer updates the model server. To be asked once there is a permit: its half is known then."""
        if self._happens is None:
            record = await self._api.get_run(self._run_id)
            self._happens = (record.trainer or {}).get("publisher") != "none"
        return self._happens

    async def wait(self) -> None:
        """Until the server's weights are a version again: started anew, it waits for the trainer to publish."""
        async with self._asking:  # one asks for all
            pause, told = _FIRST_PAUSE, False
            while not is_version(await self._server.weight_label()):
                if not told:
                    logger.warning(
                        "the model server at %s has lost the weights in training (it was started again?); "
                        "waiting for the trainer to publish them",
                        self._server.url,
                    )
                    told = True
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
