"""Registered environments: who they are, whether they live, what share of permits and batches is theirs."""

from __future__ import annotations

from redis.asyncio import Redis

from gristmill import Environment
from gristmill_api import errors
from gristmill_api.store import keys
from gristmill_api.store.calls import Calls

MOST_ENVS = 1024
"""Registered environments per run. A dead one gives its place to a new one."""


class Environments:
    def __init__(self, redis: Redis, calls: Calls, ttl_ms: int) -> None:
        self._redis = redis
        self._calls = calls
        self._ttl_ms = ttl_ms

    async def register(self, run_id: str, env_id: str, weight: float | None, allocation: float | None) -> None:
        """Register an environment, or change what it registered. Raises ApiProblem (409) if too many are alive."""
        if await self._join(run_id, env_id, "register", weight, allocation) == "FULL":
            raise errors.too_many(
                "envs", f"run {run_id!r} has {MOST_ENVS} living environments", "Stop some of them first."
            )

    async def heartbeat(self, run_id: str, env_id: str) -> None:
        """Hear that it lives. Raises ApiProblem (404) for one that never registered."""
        if await self._join(run_id, env_id, "heartbeat", None, None) == "UNKNOWN":
            raise errors.env_missing(run_id, env_id)

    async def leave(self, run_id: str, env_id: str) -> bool:
        """It goes. False: it was not here."""
        _, known = await self._calls.run("part", run_id, env_id)
        return bool(known)

    async def all(self, run_id: str) -> list[Environment]:
        """All that registered and did not leave, dead ones too."""
        found: list[bytes] = await self._redis.zrange(keys.prefix(run_id) + "envs", 0, -1)  # type: ignore[assignment]
        names = [name.decode() for name in found]
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            for name in names:
                pipe.zscore(keys.prefix(run_id) + "envs", name)
                pipe.hmget(f"{keys.prefix(run_id)}env:{name}", "weight", "min_batch_allocation")
            (seconds, micros), *facts = await pipe.execute()
        now_ms = seconds * 1000 + micros // 1000
        return [
            Environment(env_id=name, weight=_number(weight), min_batch_allocation=_number(share), alive=until > now_ms)
            for name, until, (weight, share) in zip(names, facts[::2], facts[1::2], strict=True)
            if until is not None
        ]

    async def _join(self, run_id: str, env_id: str, what: str, weight: float | None, allocation: float | None) -> str:
        numbers = ["" if number is None else repr(number) for number in (weight, allocation)]
        (status,) = await self._calls.run("join", run_id, env_id, self._ttl_ms, what, *numbers, MOST_ENVS)
        return str(status)


def _number(value: bytes | None) -> float | None:
    return float(value) if value else None
