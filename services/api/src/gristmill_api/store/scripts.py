"""The Lua scripts: read from the package, included files put in, run by EVALSHA.

redis-py's registered scripts load themselves on NOSCRIPT, so a Redis that was restarted needs no care.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, RedisError

_INCLUDE = re.compile(r"^-- include: (\S+)$", re.MULTILINE)


def source(name: str) -> str:
    """The text of lua/<name>.lua as Redis gets it."""
    folder = files("gristmill_api.store") / "lua"

    def included(match: re.Match[str]) -> str:
        return (folder / match[1]).read_text(encoding="utf-8")

    return _INCLUDE.sub(included, (folder / f"{name}.lua").read_text(encoding="utf-8"))


class Scripts:
    """Runs scripts by name on one Redis. Every script's KEYS[1] is the run's prefix."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._scripts: dict[str, AsyncScript] = {}

    async def run(self, name: str, prefix: str, *args: str | bytes | int) -> list[Any]:
        """The script's reply: a list, strings as bytes. Raises redis.RedisError."""
        reply: list[Any] = await self._script(name)(keys=[prefix], args=args)
        return reply

    async def run_on(
        self, payloads: Mapping[str, bytes], ttl_ms: int, name: str, prefix: str, *args: str | bytes | int
    ) -> list[Any]:
        """Set keys, which the script takes over or which go by themselves, and run it: in one round trip and, with
        appendfsync always, one fsync."""
        script = self._script(name)
        async with self._redis.pipeline(transaction=False) as pipe:
            for key, payload in payloads.items():
                pipe.set(key, payload, px=ttl_ms)
            pipe.evalsha(script.sha, 1, prefix, *args)
            *_, reply = results = await pipe.execute(raise_on_error=False)
        for result in results:
            if isinstance(result, NoScriptError):
                return await self.run(name, prefix, *args)
            if isinstance(result, RedisError):
                raise result
        answer: list[Any] = reply
        return answer

    def _script(self, name: str) -> AsyncScript:
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self._redis.register_script(source(name))
        return script
