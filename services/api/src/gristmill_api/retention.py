"""The task that deletes finished runs from the store when their retention period is over."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from redis.exceptions import RedisError

from gristmill.logs import line
from gristmill_api.store import Store

_LOG = logging.getLogger(__name__)
_PAUSE_S: Final = 60.0


async def keep_retention(store: Store, retention_s: float) -> None:
    """Delete runs that finished more than `retention_s` seconds ago, every minute, until it is cancelled; and continue
    deletions that were interrupted. 0: finished runs stay. Several processes may each run one."""
    indexed = False
    while True:
        try:
            if not indexed:
                await store.index()
                indexed = True
            for run_id in await store.delete_old_runs(retention_s):
                _LOG.info(line("delete", run=run_id, by="retention"))
        except RedisError as error:
            # The task that watches Redis reports that it is away.
            _LOG.debug(line("retention", why=str(error)))
        await asyncio.sleep(_PAUSE_S)
