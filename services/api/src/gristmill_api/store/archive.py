"""Trained groups and the fates of other groups that wait to be written to disk, and the lease of the process that
writes them.

Several API processes may serve one Redis. The lease is a key with a random value and a time limit. Each call that
removes a group or a fate from Redis carries the value, and its script compares the value with the key in the same
atomic step. So a process that was paused for longer than its lease removes nothing that its successor has yet to write.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import LockError

from gristmill import GristmillError
from gristmill_api.store import keys
from gristmill_api.store.records import text
from gristmill_api.store.scripts import Scripts

HOLD_S = 10.0
"""Another process replaces an archiver that does not call `keep` for this long."""


class LeaseLostError(GristmillError):
    """This process no longer has the archiver's lease. Its successor checks which groups are on disk, and writes the
    others."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            "archive_lease_lost",
            f"the archive of run {run_id!r} was not continued: this process was paused for longer than its lease of "
            f"{HOLD_S:g} s, so another process may write the archive",
        )


@dataclass(frozen=True)
class WaitingRun:
    """A run with trained groups that wait."""

    run_id: str
    created_ms: int


class ArchiveQueue:
    """The process that holds the lease works on the queue."""

    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        self._redis = redis
        self._scripts = scripts
        self._lock = redis.lock(keys.ARCHIVER, timeout=HOLD_S, blocking=False)
        self._token = ""
        self._until = 0.0

    async def acquire(self) -> bool:
        """Acquire the lease. False: another process has it."""
        began, token = time.monotonic(), secrets.token_hex(16)
        if not await self._lock.acquire(token=token):
            return False
        self._token, self._until = token, began + HOLD_S
        return True

    async def keep(self) -> bool:
        """Keep the lease for another HOLD_S. False: this process did not have it, or was paused for too long."""
        began = time.monotonic()
        try:
            reacquired = bool(await self._lock.reacquire())
        except LockError:
            reacquired = False
        self._until = began + HOLD_S if reacquired else 0.0
        return reacquired

    def is_held(self) -> bool:
        """Returns whether this process has the lease by its own clock, which also counts the time of a pause. Redis
        starts to count after this process, so the lease never ends earlier in Redis."""
        return time.monotonic() < self._until

    async def is_taken(self) -> bool:
        """Returns whether a process has the lease."""
        return bool(await self._lock.locked())

    async def release(self) -> None:
        """Release the lease, so that another process may continue at once."""
        self._until = 0.0
        with contextlib.suppress(LockError):  # This process did not have it.
            await self._lock.release()

    async def waiting(self) -> list[WaitingRun]:
        """Returns the runs with groups that wait, oldest run first."""
        return await self._runs_with(keys.archive)

    async def open_runs(self) -> set[str]:
        """Returns the ids of the runs whose groups are still trained on."""
        return {text(run_id) for run_id in await self._redis.smembers(keys.OPEN)}

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

    async def group(self, run_id: str, group_id: str) -> bytes | None:
        """Returns the bytes of a waiting group; None if it waits no longer."""
        return await self._redis.get(keys.payload(run_id, group_id))  # type: ignore[return-value]

    async def fates(self, run_id: str, count: int) -> list[bytes]:
        """Returns the JSON of the fates that wait longest."""
        return await self._redis.lrange(keys.fates(run_id), 0, count - 1)  # type: ignore[return-value]

    async def fates_written(self, run_id: str, count: int) -> None:
        """Forget the first `count` fates. They are on disk, or no process archives. Raises LeaseLostError."""
        await self._remove("fates_written", run_id, count)

    async def archived(self, run_id: str, group_ids: Sequence[str], *, lost: bool = False) -> None:
        """Free the bytes of groups that are on disk. `lost`: they are not on disk; the run's status counts them.

        Raises LeaseLostError.
        """
        await self._remove("archived", run_id, "1" if lost else "", *group_ids)

    async def _remove(self, script: str, run_id: str, *args: str | int) -> None:
        status, *_ = await self._scripts.call(script, run_id, self._token, *args)
        if status == "FENCED":
            self._until = 0.0
            raise LeaseLostError(run_id)
