"""The task that keeps `<run>/run.json`, the settings and the state of each run, up to date."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Final

from redis.exceptions import RedisError

from gristmill import RunRecord, RunState
from gristmill.archive.run_file import RUN_FILE, write_run_file
from gristmill.logs import line
from gristmill_api.errors import ApiProblem
from gristmill_api.store.runs import Runs

_LOG = logging.getLogger(__name__)
_PERIOD_S: Final = 2.0
_LAST_S: Final = 5.0
"""Longest time for the last update, when the process ends."""


class RunFiles:
    """The files of all runs in one folder. Several processes may each have one: they write the same content.

    An error of the disk is logged once per run, and tried again.
    """

    def __init__(self, runs: Runs, runs_dir: Path) -> None:
        self._runs = runs
        self._runs_dir = runs_dir
        self._written: dict[str, str] | None = None
        """The revision of each run that its file has; None before the first update."""
        self._failing: set[str] = set()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """`run` returns after one more update, or after `_LAST_S` seconds."""
        self._stopping.set()

    async def run(self) -> None:
        """Writes the files of runs that changed, every two seconds until `stop`. After an error it may run again."""
        while not self._stopping.is_set():
            await self._update()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _PERIOD_S)
        with contextlib.suppress(TimeoutError):  # Then the next process writes what is left.
            async with asyncio.timeout(_LAST_S):
                await self._update()

    async def _update(self) -> None:
        try:
            revisions = await self._runs.revisions()
            known = self._written or {}
            begins, self._written = self._written is None, {one: known[one] for one in known if one in revisions}
            for run_id, revision in revisions.items():
                if self._written.get(run_id) != revision and await self._write(run_id, begins=begins):
                    # If the record changed since `revisions`, the next update finds another revision.
                    self._written[run_id] = revision
        except RedisError as error:
            # The task that watches Redis reports that it is away.
            _LOG.debug(line("run-files", why=str(error)))

    async def _write(self, run_id: str, *, begins: bool) -> bool:
        """Returns whether the file has the run's record now. `begins`: the run may have finished long ago."""
        try:
            record = await self._runs.record(run_id)
        except ApiProblem:
            return True  # It was deleted meanwhile.
        try:
            await asyncio.to_thread(_write, self._runs_dir / run_id, record, begins=begins)
        except OSError as error:
            if run_id not in self._failing:
                self._failing.add(run_id)
                _LOG.warning(line("run-files", run=run_id, file=RUN_FILE, why=str(error)))
            return False
        self._failing.discard(run_id)
        return True


def _write(folder: Path, record: RunRecord, *, begins: bool) -> None:
    if begins and record.state == RunState.FINISHED and not folder.exists():
        return  # A user removed the folder of a finished run: it stays away.
    write_run_file(folder, record)
