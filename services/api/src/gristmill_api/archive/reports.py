"""The task that writes `<run>/report.html` once a run has ended: its environments are gone, and its groups are on disk.

The files are read in a separate process, which ends with the report. A report that fails is one line of the log.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from redis.exceptions import RedisError

from gristmill.errors import GristmillError
from gristmill.folders import REPORT_FILE
from gristmill.internal.logs import line
from gristmill_api.errors import ApiProblem
from gristmill_api.store import Store
from gristmill_api.store.envs import REPORT_CLAIM
from gristmill_view.report import write_report
from gristmill_view.run_source import RunSource

_LOG = logging.getLogger(__name__)
_PERIOD_S: Final = 1.0
_RECENT_S: Final = 3600.0
"""A run that ended longer ago gets no report any more: `gristmill report` writes one."""
_PATIENCE_S: Final = 900.0
"""An environment that is still alive this long after the end of its run does not delay the report any longer."""
_CLAIM_MS: Final = 600_000


class RunReports:
    """The reports of all runs in one folder. Several processes may each have one: the one with the claim writes."""

    def __init__(self, store: Store, source: Callable[[], RunSource], runs_dir: Path) -> None:
        """`source`: opens a reader of the runs, which is closed after each report."""
        self._store = store
        self._source = source
        self._runs_dir = runs_dir
        self._holder = f"report-{secrets.token_hex(8)}"
        self._settled: dict[str, int] = {}
        """The end, in ms, of each run whose report is written or was given up."""

    async def run(self) -> None:
        """Writes reports until it is cancelled."""
        while True:
            try:
                await self._write_all()
            except (RedisError, TimeoutError) as error:
                # The task that watches Redis reports that it is away.
                _LOG.debug(line("report", why=str(error)))
            await asyncio.sleep(_PERIOD_S)

    async def _write_all(self) -> None:
        finished = await self._store.runs.finished(_RECENT_S)
        self._settled = {run_id: at for run_id, at in self._settled.items() if finished.get(run_id) == at}
        for run_id, finished_ms in finished.items():
            if run_id not in self._settled:
                try:
                    await self._consider(run_id, finished_ms)
                except ApiProblem as error:
                    _LOG.debug(line("report", run=run_id, why=error.message))  # The run was deleted meanwhile.

    async def _consider(self, run_id: str, finished_ms: int) -> None:
        path = self._runs_dir / run_id / REPORT_FILE
        if path.exists() and path.stat().st_mtime * 1000 >= finished_ms:
            self._settled[run_id] = finished_ms
        elif await self._is_over(run_id, finished_ms):
            if not path.parent.exists():  # A user removed the folder: it stays away.
                self._settled[run_id] = finished_ms
            elif await self._claim(run_id, finished_ms):
                self._settled[run_id] = finished_ms
                await self._write(run_id, path)

    async def _is_over(self, run_id: str, finished_ms: int) -> bool:
        status = await self._store.runs.status(run_id)
        waited = time.time() - finished_ms / 1000 > _PATIENCE_S
        return status.trained > 0 and not status.archiving and (not status.envs or waited)

    async def _claim(self, run_id: str, finished_ms: int) -> bool:
        # An extended run ends again, and another process may have the claim of the end before.
        name = f"{REPORT_CLAIM}:{finished_ms}"
        return await self._store.envs.claim(run_id, name, self._holder, _CLAIM_MS) == self._holder

    async def _write(self, run_id: str, path: Path) -> None:
        try:
            with closing(self._source()) as source:
                await write_report(source, run_id, path)
        except (GristmillError, OSError) as error:
            _LOG.warning(line("report", run=run_id, why=str(error)))
        except Exception:  # noqa: BLE001  whatever is in its files, other runs get their reports
            _LOG.exception(line("report", run=run_id, why="the files of the run cannot be read"))
        else:
            _LOG.info(line("report", run=run_id, file=path))
