"""The Lua scripts: read from the package, included files put in, run by EVALSHA.

A script that Redis does not know is loaded and run again, so a Redis that was restarted needs no care.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, ResponseError

Command = Sequence[str | bytes | int]

_SENT_TTL_MS = 60_000
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
        self._hashes: dict[str, str] = {}

    async def run(self, name: str, prefix: str, *args: str | bytes | int) -> list[Any]:
        """The script's reply: a list, strings as bytes. Raises redis.RedisError."""
        return await self.run_on({}, name, prefix, *args)

    async def run_on(
        self, payloads: Mapping[str, bytes], name: str, prefix: str, *args: str | bytes | int
    ) -> list[Any]:
        """Set keys, which the script takes over, and run it: in one round trip and, with appendfsync always, one
        fsync. Keys that no script took go by themselves."""
        sha = self._hashes.get(name)
        if sha is None:
            sha = self._hashes[name] = hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()
        command: Command = ("EVALSHA", sha, 1, prefix, *args)
        sets: list[Command] = [("SET", key, body, "PX", _SENT_TTL_MS) for key, body in payloads.items()]
        replies = await self._ask([*sets, command])
        if isinstance(replies[-1], NoScriptError):
            await self._redis.script_load(source(name))
            replies[-1:] = await self._ask([command])
        for reply in replies:
            if isinstance(reply, ResponseError):
                if payloads:  # at maxmemory what was set would stand in its own way
                    await self._ask([("DEL", *payloads)])
                raise reply
        answer: list[Any] = replies[-1]
        return answer

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        """The reply to each command, sent together, a ResponseError in the place of one that Redis refused.

        Past redis-py's client, straight to its connections: what the client does for a command takes longer than the
        script. Raises redis.ConnectionError or redis.TimeoutError when an answer is lost: then any may have run.
        """
        pool = self._redis.connection_pool
        connection: AbstractConnection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_packed_command(connection.pack_commands(commands))
            return [await self._reply(connection) for _ in commands]
        except BaseException:
            await connection.disconnect(nowait=True)  # so that nobody reads an answer that was not for them
            raise
        finally:
            await pool.release(connection)

    async def _reply(self, connection: AbstractConnection) -> Any:
        try:
            return await connection.read_response()
        except ResponseError as error:
            return error
