"""Calls of the Lua scripts, with the answers that every script may give turned into refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill_api import errors
from gristmill_api.store import keys
from gristmill_api.store.records import text
from gristmill_api.store.scripts import Scripts


class Calls:
    """Runs scripts on runs. A reply is its status word as text, then the rest as Redis gave it."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def run(self, script: str, run_id: str, *args: str | bytes | int) -> list[Any]:
        """Run a script that any client may run. Raises ApiProblem if the run does not exist (404), or is suspended and
        the script does not allow that (409)."""
        return await self.run_on({}, script, run_id, *args)

    async def run_on(
        self, payloads: Mapping[str, bytes], script: str, run_id: str, *args: str | bytes | int
    ) -> list[Any]:
        """`run`, with bytes for the script, by the keys where it finds them."""
        status, *rest = await self._scripts.run_on(payloads, script, keys.prefix(run_id), *args)
        if status == b"MISSING":
            raise errors.run_missing(run_id)
        if status == b"SUSPENDED":
            raise errors.suspended(run_id)
        return [text(status), *rest]

    async def trainer(self, script: str, run_id: str, incarnation: int, *args: str | int) -> list[Any]:
        """Run a script of the trainer's, which the trainer must not have been replaced for."""
        status, *rest = await self.run(script, run_id, incarnation, *args)
        if status == "FENCED":
            raise errors.fenced(run_id, incarnation, int(rest[0]))
        if status == "FINISHED":
            raise errors.finished(run_id)
        return [status, *rest]
