"""Registered environments, with their shares of permits, and claims: work that one of them does."""

from __future__ import annotations

from redis.asyncio import Redis

from gristmill import Environment
from gristmill_api import errors
from gristmill_api.settings import Limits
from gristmill_api.store import keys
from gristmill_api.store.keys import milliseconds
from gristmill_api.store.records import text
from gristmill_api.store.scripts import Scripts

MOST_ENVS = 1024
"""Registered environments per run. A new environment takes the place of a dead one."""
MOST_CLAIMS = 64
"""Claims of a run at one time."""
REPORT_CLAIM = "report"
"""The work of writing a run's report, which one API process claims."""


class Environments:
    def __init__(self, redis: Redis, scripts: Scripts, limits: Limits) -> None:
        self._redis = redis
        self._scripts = scripts
        self._ttl_ms = milliseconds(limits.env_ttl_s)

    async def register(
        self,
        run_id: str,
        env_id: str,
        weight: float | None,
        heartbeat_s: float | None = None,
        word: str = "",
    ) -> None:
        """Register an environment, or change what it registered. `word`: of the process that registers it.

        Raises ApiProblem (409) if too many are alive, for a run of Atropos' protocol, and if an environment of this
        name is alive and was registered with another word than the store's.
        """
        numbers = ["" if number is None else repr(number) for number in (weight, heartbeat_s)]
        status = await self._call(run_id, env_id, "register", *numbers, MOST_ENVS, word)
        if status == "PROTOCOL":
            raise errors.no_permits(run_id)
        if status == "FULL":
            raise errors.too_many(
                "envs", f"run {run_id!r} has {MOST_ENVS} living environments", "Stop some of them first."
            )

    async def heartbeat(self, run_id: str, env_id: str) -> None:
        """Record that the environment is alive. Raises ApiProblem (404) if the environment never registered."""
        if await self._call(run_id, env_id, "heartbeat") != "OK":
            raise errors.env_missing(run_id, env_id)

    async def unregister(self, run_id: str, env_id: str) -> bool:
        """Remove the environment. False: it was not registered."""
        return await self._call(run_id, env_id, "unregister") == "OK"

    async def all(self, run_id: str) -> list[Environment]:
        """Returns all registered environments, dead ones too."""
        found: list[bytes] = await self._redis.zrange(keys.prefix(run_id) + "envs", 0, -1)  # type: ignore[assignment]
        names = [name.decode() for name in found]
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            for name in names:
                pipe.zscore(keys.prefix(run_id) + "envs", name)
                pipe.hmget(f"{keys.prefix(run_id)}env:{name}", "weight", "min_batch_allocation", "heartbeat_s")
            (seconds, micros), *facts = await pipe.execute()
        now_ms = seconds * 1000 + micros // 1000
        return [
            Environment(
                env_id=name,
                weight=_number(weight),
                min_batch_allocation=_number(share),
                heartbeat_s=_number(heartbeat),
                alive=until > now_ms,
                last_seen_s=max(now_ms - (until - self._ttl_ms), 0) / 1000,
            )
            for name, until, (weight, share, heartbeat) in zip(names, facts[::2], facts[1::2], strict=True)
            if until is not None
        ]

    async def claim(self, run_id: str, name: str, holder: str, ttl_ms: int) -> str:
        """Claim work by its name. Returns who has the claim now: `holder`, or another whose claim has not expired.

        Raises ApiProblem (409) if the run has 64 other claims.
        """
        status, *rest = await self._scripts.call("claim", run_id, name, holder, ttl_ms, MOST_CLAIMS)
        if status == "FULL":
            raise errors.too_many(
                "claims", f"run {run_id!r} has {MOST_CLAIMS} claims", "Wait until one of them runs out; they all do."
            )
        return text(rest[0]) if status == "HELD" else holder

    async def _call(self, run_id: str, env_id: str, what: str, *args: str | int) -> str:
        (status,) = await self._scripts.call("environment", run_id, env_id, what, self._ttl_ms, *args)
        return str(status)


def _number(value: bytes | None) -> float | None:
    return float(value) if value else None
