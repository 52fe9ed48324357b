"""Dead letters: groups that were delivered too often, or that no batch can hold."""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

from gristmill import DeadLetter
from gristmill_api.store import keys
from gristmill_api.store.records import text
from gristmill_api.store.scripts import Scripts


class DeadLetters:
    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        self._redis = redis
        self._scripts = scripts

    async def all(self, run_id: str, offset: int, limit: int) -> list[DeadLetter]:
        """Returns dead letters, oldest first."""
        start = keys.prefix(run_id) + "dead"
        entries: list[bytes] = await self._redis.zrange(start, offset, offset + limit - 1)  # type: ignore[assignment]
        ids = [name.decode() for name in entries]
        async with self._redis.pipeline(transaction=False) as pipe:
            for group_id in ids:
                pipe.hmget(keys.group(run_id, group_id), "env_id", "reason", "attempts", "sequences", "bytes")
            rows = await pipe.execute()
        return [
            DeadLetter(
                group_id=group_id,
                env_id=text(env_id),
                reason=text(reason),
                attempts=int(attempts),
                sequences=int(sequences),
                bytes=int(size),
            )
            for group_id, (env_id, reason, attempts, sequences, size) in zip(ids, rows, strict=True)
            if attempts is not None  # replayed or purged meanwhile
        ]

    async def replay(self, run_id: str, group_ids: Sequence[str] | None) -> int:
        """Make the named dead letters ready again, or all. Returns how many there were."""
        return await self._settle("replay", run_id, group_ids)

    async def purge(self, run_id: str, group_ids: Sequence[str] | None) -> int:
        """Drop the named dead letters, or all. Returns how many there were."""
        return await self._settle("purge", run_id, group_ids)

    async def _settle(self, what: str, run_id: str, group_ids: Sequence[str] | None) -> int:
        which = ("all",) if group_ids is None else ("named", *group_ids)
        _, count = await self._scripts.call("dead_letters", run_id, what, *which)
        return int(count)
