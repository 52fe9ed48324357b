"""The Lua scripts: read from the package, included files put in, run by EVALSHA.

redis-py's registered scripts load themselves on NOSCRIPT, so a Redis that was restarted needs no care.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

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
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self._redis.register_script(source(name))
        reply: list[Any] = await script(keys=[prefix], args=args)
        return reply
