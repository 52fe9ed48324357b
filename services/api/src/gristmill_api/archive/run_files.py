"""The task that keeps `<run>/run.json`, the settings and the state of each run, up to date.

The files also show which runs Redis should have. The task reports a run whose file is newer than Redis: Redis
started with an empty or an older append-only file, or could not replay the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Final

from redis.exceptions import RedisError

from gristmill import RunRecord, RunState
from gristmill.archive.run_file import RUN_FILE, read_run_file, write_run_file
from gristmill.errors import GristmillError
from gristmill.internal.logs import line
from gristmill_api.errors import ApiProblem
from gristmill_api.metrics import Metrics
from gristmill_api.store.runs import Runs

_LOG = logging.getLogger(__name__)
_PERIOD_S: Final = 2.0
_LAST_S: Final = 5.0
"""Longest time for the last update, when the process ends."""


class RunFiles:
    """The files of all runs in one folder. Several processes may each have one: they write the same content.

    An error of the disk is logged once per run, and tried again.
    """

    def __init__(self, runs: Runs, runs_dir: Path, metrics: Metrics) -> None:
        self._runs = runs
        self._runs_dir = runs_dir.resolve()
        self._metrics = metrics
        self._lost: dict[str, str] = {}
        """The runs that Redis has lost, and their creations."""
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
            written = self._written or {}
            if self._written is None or not written.keys() <= revisions.keys() or self._lost:
                await self._find_lost(revisions)
            begins, self._written = self._written is None, {one: written[one] for one in written if one in revisions}
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
            newer = await asyncio.to_thread(_write, self._runs_dir / run_id, record, begins=begins)
        except OSError as error:
            if run_id not in self._failing:
                self._failing.add(run_id)
                _LOG.warning(line("run-files", run=run_id, file=RUN_FILE, why=str(error)))
            return False
        self._failing.discard(run_id)
        if newer is not None:
            self._report_lost(newer, f"Redis has an older state of it (creation {record.creation})")
        elif self._lost.get(run_id) == record.creation:
            self._found(run_id)
        return True

    async def _find_lost(self, revisions: Mapping[str, str]) -> None:
        """Reports the runs that are open by their files and not in Redis."""
        unfinished = await asyncio.to_thread(_unfinished, self._runs_dir, revisions)
        for run_id in self._lost.keys() - revisions.keys() - unfinished.keys():
            self._found(run_id)  # A user removed its folder.
        for run_id, record in unfinished.items():
            if not await self._runs.was_deleted(run_id):
                self._report_lost(record, f"Redis has {len(revisions) or 'no'} other runs")
                continue
            with contextlib.suppress(OSError):  # Then the next start of the API tries again.
                await asyncio.to_thread(_write_deleted, self._runs_dir / run_id, record)

    def _report_lost(self, record: RunRecord, instead: str) -> None:
        if self._lost.get(record.run_id) == record.creation:
            return
        self._lost[record.run_id] = record.creation
        self._metrics.lost_runs.set(len(self._lost))
        _LOG.error(
            "REDIS HAS LOST RUN %s [store_lost_run]: %s is of a run that is %s (creation %s), and %s. Stop the "
            "services, keep a copy of Redis' data, and read docs/troubleshooting.md, 'Redis has lost a run'.",
            record.run_id,
            self._runs_dir / record.run_id / RUN_FILE,
            record.state,
            record.creation,
            instead,
        )

    def _found(self, run_id: str) -> None:
        del self._lost[run_id]
        self._metrics.lost_runs.set(len(self._lost))
        _LOG.info(line("run-files", run=run_id, lost="no longer"))


def _write(folder: Path, record: RunRecord, *, begins: bool) -> RunRecord | None:
    """Writes the file. Returns the earlier file's record if Redis lost it. Of the same run, the newer file stays."""
    if begins and record.state == RunState.FINISHED and not folder.exists():
        return None  # A user removed the folder of a finished run: it stays away.
    before = _read(folder / RUN_FILE)
    newer = before if before is not None and _is_newer(before, record) else None
    if newer is None or newer.creation != record.creation:
        write_run_file(folder, record)
    return newer


def _write_deleted(folder: Path, record: RunRecord) -> None:
    """Marks a deleted run as finished, or removes its folder if no trainer had taken it.

    Any environment may open runs that no trainer takes, so their folders would fill the disk.
    """
    if record.incarnation == 0 and [entry.name for entry in folder.iterdir()] == [RUN_FILE]:
        (folder / RUN_FILE).unlink()
        folder.rmdir()
    else:
        write_run_file(folder, record.model_copy(update={"state": RunState.FINISHED}))


def _is_newer(file: RunRecord, record: RunRecord) -> bool:
    """Returns whether Redis forgot what the file says. Each new trainer, also of the next run of this id, has a higher
    incarnation."""
    if file.creation == record.creation:
        return file.incarnation > record.incarnation
    return file.state != RunState.FINISHED and 0 < file.incarnation >= record.incarnation


def _unfinished(runs_dir: Path, known: Container[str]) -> dict[str, RunRecord]:
    """Returns the runs in the folder that are not known and not finished, by their files."""
    if not runs_dir.is_dir():
        return {}
    names = [entry.name for entry in runs_dir.iterdir() if entry.name not in known]
    records = {name: _read(runs_dir / name / RUN_FILE) for name in names}
    return {
        name: record
        for name, record in records.items()
        if record and record.run_id == name and record.state != RunState.FINISHED
    }


def _read(path: Path) -> RunRecord | None:
    """Returns the record; None if the file does not exist or this version cannot read it."""
    try:
        return read_run_file(path)
    except (OSError, GristmillError):
        return None
