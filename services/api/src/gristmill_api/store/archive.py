"""Trained groups and the fates of other groups that wait to be written to disk, and the lock of the process that writes
them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import LockError

from gristmill_api.store import keys
from gristmill_api.store.records import text
from gristmill_api.store.scripts import Scripts

HOLD_S = 10.0
"""Another process replaces an archiver that does not call `keep` for this long."""


@dataclass(frozen=True)
class WaitingRun:
    """A run with trained groups that wait."""

    run_id: str
    created_ms: int


@dataclass(frozen=True)
class WaitingGroup:
    schema: str
    """ "group" or "atropos"."""
    stored: bytes
    """As submitted: plain, or one zstd frame."""
    version: str
    """Policy version at the receipt of a group of Atropos' protocol. Other groups name their versions themselves."""
    trained_over_v1: bool
    """A trainer of /v1 has taken the run."""


class ArchiveQueue:
    """The process that holds the lock works on the queue."""

    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        self._redis = redis
        self._scripts = scripts
        self._lock = redis.lock(keys.ARCHIVER, timeout=HOLD_S, blocking=False)

    async def claim(self) -> bool:
        """Acquire the lock. False: another process has it."""
        return bool(await self._lock.acquire())

    async def keep(self) -> bool:
        """Keep the lock for another HOLD_S. False: this process did not have it, or was paused for too long."""
        try:
            return bool(await self._lock.reacquire())
        except LockError:
            return False

    async def is_taken(self) -> bool:
        """Returns whether a process has the lock."""
        return bool(await self._lock.locked())

    async def release(self) -> None:
        """Release the lock, so that another process may continue at once."""
        with contextlib.suppress(LockError):  # This process did not have it.
            await self._lock.release()

    async def waiting(self) -> list[WaitingRun]:
        """Returns the runs with groups that wait, oldest run first."""
        return await self._runs_with(keys.archive)

    async def waiting_fates(self) -> list[WaitingRun]:
        """Returns the runs with fates that wait, oldest run first."""
        return await self._runs_with(keys.fates)

    async def _runs_with(self, key: Callable[[str], str]) -> list[WaitingRun]:
        """Returns the runs whose list of this key is not empty."""
        runs: list[tuple[bytes, float]] = await self._redis.zrange(keys.RUNS, 0, -1, withscores=True)  # type: ignore[assignment]
        ids = [text(run_id) for run_id, _ in runs]
        async with self._redis.pipeline(transaction=False) as pipe:
            for run_id in ids:
                pipe.llen(key(run_id))
            counts = await pipe.execute()
        return [
            WaitingRun(run_id, int(created_ms))
            for run_id, (_, created_ms), count in zip(ids, runs, counts, strict=True)
            if count
        ]

    async def head(self, run_id: str, count: int) -> list[str]:
        """Returns the ids that wait longest, in the order of their acks."""
        ids: list[bytes] = await self._redis.lrange(keys.archive(run_id), 0, count - 1)  # type: ignore[assignment]
        return [text(group_id) for group_id in ids]

    async def group(self, run_id: str, group_id: str) -> WaitingGroup | None:
        """Returns a waiting group; None if it waits no longer."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(keys.group(run_id, group_id), "schema", "version")
            pipe.get(keys.payload(run_id, group_id))
            pipe.hexists(keys.record(run_id), "trainer")
            (schema, version), stored, taken = await pipe.execute()
        return None if stored is None else WaitingGroup(text(schema), stored, text(version or b""), bool(taken))

    async def fates(self, run_id: str, count: int) -> list[bytes]:
        """Returns the JSON of the fates that wait longest."""
        return await self._redis.lrange(keys.fates(run_id), 0, count - 1)  # type: ignore[return-value]

    async def fates_written(self, run_id: str, count: int) -> None:
        """Forget the first `count` fates. They are on disk, or no process archives."""
        await self._redis.lpop(keys.fates(run_id), count)

    async def archived(self, run_id: str, group_ids: Sequence[str], *, lost: bool = False) -> None:
        """Free the bytes of groups that are on disk. `lost`: they are not on disk; the run's status counts them."""
        await self._scripts.call("archived", run_id, "1" if lost else "", *group_ids)
