"""Trained groups that wait to be written to disk, and who may write them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import LockError

from gristmill_api.store import keys
from gristmill_api.store.calls import Calls
from gristmill_api.store.records import text

HOLD_S = 10.0
"""An archiver that does not say `keep` for so long is replaced by another process'."""


@dataclass(frozen=True)
class WaitingRun:
    """A run of which trained groups wait."""

    run_id: str
    created_ms: int


@dataclass(frozen=True)
class WaitingGroup:
    schema: str
    """ "group" or "atropos"."""
    stored: bytes
    """As submitted: plain, or one zstd frame."""


class ArchiveQueue:
    """One process at a time works on it: the one that holds the lock."""

    def __init__(self, redis: Redis, calls: Calls) -> None:
        self._redis = redis
        self._calls = calls
        self._lock = redis.lock(keys.ARCHIVER, timeout=HOLD_S, blocking=False)

    async def take(self) -> bool:
        """Become the one that works on it. False: another process is."""
        return bool(await self._lock.acquire())

    async def keep(self) -> bool:
        """Stay the one for another HOLD_S. False: this process was not, or stood still for too long."""
        try:
            return bool(await self._lock.reacquire())
        except LockError:
            return False

    async def is_taken(self) -> bool:
        """Whether a process works on it."""
        return bool(await self._lock.locked())

    async def let_go(self) -> None:
        """Another process may go on at once."""
        with contextlib.suppress(LockError):  # This process was not the one.
            await self._lock.release()

    async def waiting(self) -> list[WaitingRun]:
        """The runs of which groups wait, oldest run first."""
        runs: list[tuple[bytes, float]] = await self._redis.zrange(keys.RUNS, 0, -1, withscores=True)  # type: ignore[assignment]
        ids = [text(run_id) for run_id, _ in runs]
        async with self._redis.pipeline(transaction=False) as pipe:
            for run_id in ids:
                pipe.llen(keys.archive(run_id))
            counts = await pipe.execute()
        return [
            WaitingRun(run_id, int(created_ms))
            for run_id, (_, created_ms), count in zip(ids, runs, counts, strict=True)
            if count
        ]

    async def head(self, run_id: str, count: int) -> list[str]:
        """The ids that wait longest, in the order of their acks."""
        ids: list[bytes] = await self._redis.lrange(keys.archive(run_id), 0, count - 1)  # type: ignore[assignment]
        return [text(group_id) for group_id in ids]

    async def group(self, run_id: str, group_id: str) -> WaitingGroup | None:
        """A waiting group; None when it waits no longer."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(keys.group(run_id, group_id), "schema")
            pipe.get(keys.payload(run_id, group_id))
            schema, stored = await pipe.execute()
        return None if stored is None else WaitingGroup(text(schema), stored)

    async def archived(self, run_id: str, group_ids: Sequence[str], *, lost: bool = False) -> None:
        """Free their bytes, which are on disk. `lost`: they are not; the run's status counts them."""
        await self._calls.run("archived", run_id, "1" if lost else "", *group_ids)
