"""The Lua scripts: read from the package, with included files inserted, and run by EVALSHA.

A script that Redis does not know is loaded and run again, so the API continues after a restart of Redis.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import ConnectionError, NoScriptError, OutOfMemoryError, ResponseError  # noqa: A004

from gristmill_api import errors
from gristmill_api.store import keys
from gristmill_api.store.connection import Command, ask, wait_replicas
from gristmill_api.store.records import text

_SENT_TTL_MS = 60_000
_WAIT_MS: Final = 1000
"""Longest wait for the replicas of a write."""
_ASK_FIRST: Final = 4 * 1024 * 1024
"""Bytes. For a payload larger than this, one more round trip costs little."""
_INCLUDE = re.compile(r"^-- include: (\S+)$", re.MULTILINE)


def source(name: str) -> str:
    """Returns the text of lua/<name>.lua as Redis receives it."""
    folder = files("gristmill_api.store") / "lua"

    def included(match: re.Match[str]) -> str:
        return (folder / match[1]).read_text(encoding="utf-8")

    return _INCLUDE.sub(included, (folder / f"{name}.lua").read_text(encoding="utf-8"))


class Scripts:
    """Runs scripts by name on one Redis. Every script's KEYS[1] is the run's prefix."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._replicas = wait_replicas(redis)
        self._hashes: dict[str, str] = {}
        self._full: set[str] = set()
        """Prefixes of the runs whose last payload found no room."""
        self._creation: str | None = None
        self._word: str | None = None

    def of(self, creation: str | None, word: str | None) -> Scripts:
        """Returns the scripts for calls that name the creation of their run, or come from an environment.

        `word`: of the environment's registration; None: the caller may act for every environment.
        """
        scripts = copy.copy(self)
        scripts._creation, scripts._word = creation, word
        return scripts

    async def call(
        self, name: str, run_id: str, *args: str | bytes | int, payloads: Mapping[str, bytes] | None = None
    ) -> list[Any]:
        """Run a script on a run. Returns its status word as text, then the rest of its reply as Redis sent it.

        `payloads`: bytes for the script, by the keys at which the script finds them. Raises ApiProblem if the run does
        not exist (404), has another creation than the call names (409), or is suspended and the script does not allow
        that (409). An environment that calls under the name of another is refused too (409).
        """
        status, *rest = await self.run(name, keys.prefix(run_id), *args, payloads=payloads)
        if status == b"MISSING":
            raise errors.run_missing(run_id)
        if status == b"CREATION":
            raise errors.other_creation(run_id, self._creation, text(rest[0]))
        if status == b"REGISTERED":
            raise errors.other_registration(run_id, text(rest[0]), int(rest[1]) / 1000)
        if status == b"SUSPENDED":
            raise errors.suspended(run_id)
        return [text(status), *rest]

    async def call_as_trainer(self, name: str, run_id: str, incarnation: int | None, *args: str | int) -> list[Any]:
        """Run a script of the trainer's side. Raises ApiProblem also if another incarnation replaced the trainer, or
        the run is finished (409). `incarnation` None: for a trainer of Atropos' protocol, which has no incarnations.
        """
        status, *rest = await self.call(name, run_id, "" if incarnation is None else incarnation, *args)
        if status == "FENCED":
            raise errors.fenced(run_id, incarnation or 0, int(rest[0]))
        if status == "FINISHED":
            raise errors.finished(run_id)
        return [status, *rest]

    async def run(
        self, name: str, prefix: str, *args: str | bytes | int, payloads: Mapping[str, bytes] | None = None
    ) -> list[Any]:
        """Returns the script's reply: a list, strings as bytes. Raises redis.RedisError.

        `payloads` are set before the script runs, in the same round trip and, with appendfsync always, the same fsync.
        The script takes the keys over; keys that no script took expire.

        Large payloads, and all payloads of a run whose last payload found no room, are sent only if the script, run
        without them, answers GONE. So a submit that is repeated until there is room does not write its payload each
        time.
        """
        payloads = payloads or {}
        if payloads and (prefix in self._full or sum(map(len, payloads.values())) > _ASK_FIRST):
            reply = await self._send({}, name, prefix, *args)
            if reply[0] != b"GONE":
                return reply
        try:
            reply = await self._send(payloads, name, prefix, *args)
        except OutOfMemoryError:
            self._full.add(prefix)
            raise
        if payloads:
            self._full.discard(prefix)
            if reply[0] in (b"FULL", b"RUN_FULL"):
                self._full.add(prefix)
        return reply

    async def _send(self, payloads: Mapping[str, bytes], name: str, prefix: str, *args: str | bytes | int) -> list[Any]:
        sha = self._hashes.get(name)
        if sha is None:
            sha = self._hashes[name] = hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()
        facts = ("creation", self._creation), ("word", self._word)
        names = [prefix, *(f"{prefix}{what}:{value}" for what, value in facts if value is not None)]
        command: Command = ("EVALSHA", sha, len(names), *names, *args)
        sets: list[Command] = [("SET", key, body, "PX", _SENT_TTL_MS) for key, body in payloads.items()]
        try:
            replies = await self._ask([*sets, command])
            if isinstance(replies[-1], NoScriptError):
                await self._redis.script_load(source(name))
                replies[-1:] = await self._ask([command])
            for reply in replies:
                if isinstance(reply, ResponseError):
                    raise reply
            if payloads and replies[-1][0] == b"CREATION":  # before the script could delete them
                await self._ask([("DEL", *payloads)])
        except ResponseError:
            if payloads:  # At maxmemory the payloads that were set would take the room of the next attempt.
                await self._ask([("DEL", *payloads)])
            raise
        answer: list[Any] = replies[-1]
        return answer

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands on a connection, without redis-py's client, which takes longer than the script. See
        `connection.ask`.

        With `wait_replicas` in REDIS_URL, raises redis.ConnectionError also if the commands took effect and too few
        replicas have received them: a fail-over could undo the effect, so the caller repeats the call.
        """
        if self._replicas:
            # WAIT waits for this connection's last write. A repeated call writes nothing, and its first write may have
            # used another connection. PUBLISH is sent to the replicas, so WAIT then waits for all earlier writes.
            commands = [*commands, ("PUBLISH", keys.EVENTS, "written"), ("WAIT", self._replicas, _WAIT_MS)]
        pool = self._redis.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            replies = await ask(connection, commands)
        finally:
            await pool.release(connection)
        if self._replicas:
            *replies, published, received = replies
            for reply in (published, received):
                if isinstance(reply, ResponseError):
                    raise reply
            if received < self._replicas:
                raise ConnectionError(f"{received} of {self._replicas} replicas received the write in {_WAIT_MS} ms")
        return replies
