"""The task that moves acked groups from Redis to disk, one group in memory at a time.

It also writes what became of the other groups to `<run>/drops.jsonl`: dropped, dead letter, or let go by the archive.

An acked group stays in Redis, and counts against its caps, until it is on disk. A crash of the API, of Redis or of the
machine loses no group. A process that continues an archive passes over the groups that are on disk already. While the
disk fails, acked groups are not archived; they are counted and logged. Training never waits for the archive longer than
the few seconds of `_TRIES`.

Groups are archived as they are stored.

Redis may keep its file on the same disk, and stops when the disk is full. So the archive leaves a floor of free space:
it removes a run's oldest segments, and then lets groups go without archiving them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from redis.exceptions import RedisError

from gristmill.archive.drops import DROPS_FILE, Drop, append_drops
from gristmill.internal.archive_writer import NoRoomError, RunWriter, free_bytes
from gristmill.internal.backoff import Backoff
from gristmill.internal.logs import line
from gristmill.internal.trouble import CODES
from gristmill_api import errors
from gristmill_api.errors import ApiProblem
from gristmill_api.metrics import Metrics
from gristmill_api.notifications import Notifications
from gristmill_api.settings import Limits
from gristmill_api.store import keys
from gristmill_api.store.archive import HOLD_S, ArchiveQueue, LeaseLostError, WaitingRun

_LOG = logging.getLogger(__name__)
RECHECK_S = 2.0
_BATCH_GROUPS, _BATCH_BYTES, _BATCH_FATES = 64, 16 << 20, 1024
"""The most that is written between two fsyncs."""
_TRIES = 4
"""Writes of the same groups, with pauses of some seconds together."""
_LAST_S = 5.0
_OPEN_RUNS = 16
"""Runs whose newest segment is kept open."""


class Archiver:
    """Runs until `stop`. Several processes may each have one: the process with the lease works, the others wait for the
    lease to end (store/archive.py)."""

    def __init__(
        self, queue: ArchiveQueue, notifications: Notifications, metrics: Metrics, runs_dir: Path | None, limits: Limits
    ) -> None:
        """`runs_dir` None: archiving is off, and groups that still wait for it are let go, unless another process
        archives."""
        self._queue = queue
        self._notifications = notifications
        self._metrics = metrics
        self._runs_dir = runs_dir
        self._max_bytes = limits.archive_max_bytes
        self._min_free_bytes = limits.archive_min_free_bytes
        self._disk_is_full = False
        self._writers: OrderedDict[WaitingRun, RunWriter] = OrderedDict()
        self._failing: set[str] = set()
        self._broken: set[str] = set()
        """Runs with an error that is neither an error of the disk nor of Redis."""
        self._nobody_since = math.inf
        self._stopping = asyncio.Event()
        self._deadline = math.inf

    def stop(self) -> None:
        """`run` returns once all that waits is written, after `_LAST_S` seconds at most and the groups in hand."""
        self._deadline = time.monotonic() + _LAST_S
        self._stopping.set()
        self._notifications.publish(keys.ARCHIVE_TOPIC)

    async def run(self) -> None:
        """Archive until `stop`. After an error it may run again."""
        await self._close()  # An error may have left a writer in the middle of a group.
        with self._notifications.listening(keys.ARCHIVE_TOPIC) as woken:
            last = False
            while not last:
                last = self._stopping.is_set()
                woken.clear()
                try:
                    if await self._is_mine():
                        with contextlib.suppress(OSError):  # The next group that is written meets it, and is reported.
                            await self._keep_floor()
                        await self._for_each(await self._queue.waiting(), self._drain)
                        if not self._disk_is_full:  # The fates stay in Redis while the disk fails or is nearly full.
                            await self._for_each(await self._queue.waiting_fates(), self._write_fates)
                        if self._runs_dir is None:
                            await self._step_back()
                except LeaseLostError as error:
                    _LOG.warning(line("archive", why=str(error)))
                    await self._close()  # The successor appends to the same files.
                except RedisError as error:
                    # The call may have had no effect, or a fail-over undid it. A writer that opens now finds the groups
                    # that are on disk, and passes over them when Redis hands them out again.
                    await self._close()
                    # The task that listens to Redis logs that Redis is away. Any other error is a defect.
                    if errors.from_redis(error) is None:
                        _LOG.error("archive: Redis refused a command of ours", exc_info=error)
                if not last:
                    await _wait(woken, RECHECK_S)
        await self._close()
        with contextlib.suppress(RedisError):  # Then the lock runs out by itself.
            await self._queue.release()

    async def _is_mine(self) -> bool:
        if await self._queue.keep():
            return True
        # Another process may have written since.
        await self._close()
        if self._runs_dir is None and not await self._nobody_archives():
            return False
        return await self._queue.acquire()

    async def _nobody_archives(self) -> bool:
        """Whether no process has worked on the archive for a while. One that archives goes before one that lets go."""
        if await self._queue.is_taken():
            self._nobody_since = math.inf
            return False
        self._nobody_since = min(self._nobody_since, time.monotonic())
        return time.monotonic() - self._nobody_since >= HOLD_S

    async def _step_back(self) -> None:
        await self._queue.release()
        self._nobody_since = math.inf

    async def _keep_floor(self) -> None:
        """Make room when something else fills the disk, and warn when that does not help."""
        if self._runs_dir is None or not self._min_free_bytes:
            return
        open_runs = await self._queue.open_runs()
        for run in [run for run in self._writers if run.run_id not in open_runs]:
            await self._discard(run)  # Its groups stay.
        for writer in self._writers.values():
            with contextlib.suppress(NoRoomError):
                await asyncio.to_thread(writer.make_room)
        free = await asyncio.to_thread(free_bytes, self._runs_dir)
        is_full = free < self._min_free_bytes
        if is_full and not self._disk_is_full:
            _LOG.error(
                "THE DISK OF %s IS NEARLY FULL [disk_floor]: %d bytes are free, fewer than API_ARCHIVE_MIN_FREE_BYTES "
                "(%d). Groups are trained on and NOT archived. Remedy: %s",
                self._runs_dir,
                free,
                self._min_free_bytes,
                CODES["disk_floor"].remedy,
            )
        elif self._disk_is_full and not is_full:
            _LOG.info(line("archive", disk=self._runs_dir, free=free, state="up"))
        self._disk_is_full = is_full

    async def _for_each(self, runs: Sequence[WaitingRun], work: Callable[[WaitingRun], Awaitable[bool]]) -> None:
        """Calls `work` with each run until it returns False. An error of one run is logged, and the others continue."""
        for run in runs:
            try:
                if not await work(run):
                    return
            except ApiProblem as error:
                _LOG.warning(line("archive", run=run.run_id, why=error.message))  # The run went away meanwhile.
            except (LeaseLostError, RedisError):
                raise  # These concern all runs.
            except Exception as error:  # noqa: BLE001  a defect that one run meets must not stop the others
                await self._discard(run)
                self._metrics.task_failures.labels("archive").inc()
                if run.run_id not in self._broken:
                    self._broken.add(run.run_id)
                    _LOG.exception(line("archive", run=run.run_id, why=f"{type(error).__name__}: {error}"))
            else:
                self._broken.discard(run.run_id)

    async def _drain(self, run: WaitingRun) -> bool:
        """Writes the groups of a run that wait. Returns False if the process must stop, or has lost the lease."""
        while time.monotonic() < self._deadline and (ids := await self._queue.head(run.run_id, _BATCH_GROUPS)):
            settled, lost = await self._write(run, ids)
            if not settled:
                return False
            await self._queue.archived(run.run_id, settled, lost=lost)
            if not await self._queue.keep():
                return False
        return True

    async def _write_fates(self, run: WaitingRun) -> bool:
        """Writes the fates of a run's groups that are not in the archive. Returns what `_drain` returns."""
        while time.monotonic() < self._deadline and (fates := await self._queue.fates(run.run_id, _BATCH_FATES)):
            if not self._queue.is_held():
                raise LeaseLostError(run.run_id)
            if self._runs_dir is not None:
                try:
                    await asyncio.to_thread(append_drops, self._runs_dir / run.run_id, _drops(run, fates))
                except OSError as error:
                    _LOG.warning(line("archive", run=run.run_id, file=DROPS_FILE, why=str(error)))
                    return True
            await self._queue.fates_written(run.run_id, len(fates))
            if not await self._queue.keep():
                return False
        return True

    async def _write(self, run: WaitingRun, ids: Sequence[str]) -> tuple[Sequence[str], bool]:
        """The first of these ids that are settled now, and whether they are lost: let go without being on disk.

        No ids when the process is to stop meanwhile.
        """
        if self._runs_dir is None:
            _LOG.warning(line("archive", run=run.run_id, state="off", let_go=len(ids)))
            return ids, False
        backoff = Backoff(0.5, 3.0)
        for number in range(1, _TRIES + 1):
            try:
                written = await self._append(self._runs_dir / run.run_id / "rollouts", run, ids)
            except NoRoomError as error:
                self._give_up(run, ids, error)
                return ids, True
            except OSError as error:
                await self._discard(run)
                if number == _TRIES or run.run_id in self._failing:
                    self._give_up(run, ids, error)
                    return ids, True
                await _wait(self._stopping, backoff.next())
                if self._stopping.is_set():
                    return (), False
            else:
                break
        if run.run_id in self._failing:
            self._failing.discard(run.run_id)
            _LOG.info(line("archive", run=run.run_id, state="up"))
        return written, False

    async def _append(self, folder: Path, run: WaitingRun, ids: Sequence[str]) -> Sequence[str]:
        """Write and fsync the first of these ids: some megabytes of them, or those before the first that could not be
        written. Raises OSError if not even the first group could be written."""
        writer = await self._writer(folder, run)
        settled: list[str] = []
        size = 0
        failed = False
        for group_id in ids:
            # None: another process archived it, as this one stood still for too long.
            group = None if writer.holds(group_id) else await self._queue.group(run.run_id, group_id)
            if group is not None:
                try:
                    size += await asyncio.to_thread(self._append_group, writer, run.run_id, group_id, group)
                except OSError as error:
                    if not settled:
                        raise
                    failed = not isinstance(error, NoRoomError)
                    break
            settled.append(group_id)
            if size >= _BATCH_BYTES:
                break
        await asyncio.to_thread(writer.sync)
        if failed:
            await self._discard(run)
        return settled

    def _append_group(self, writer: RunWriter, run_id: str, group_id: str, group: bytes) -> int:
        """Writes a group. Returns its bytes. Raises LeaseLostError."""
        # Last before the write: the process may have been paused since the lease was extended.
        if not self._queue.is_held():
            raise LeaseLostError(run_id)
        writer.append(group_id, "group", group)
        return len(group)

    async def _writer(self, folder: Path, run: WaitingRun) -> RunWriter:
        if run not in self._writers:
            if len(self._writers) >= _OPEN_RUNS:
                await self._discard(next(iter(self._writers)))
            self._writers[run] = await asyncio.to_thread(
                RunWriter,
                folder,
                run.run_id,
                run.created_ms,
                self._max_bytes,
                self._min_free_bytes,
                functools.partial(_report_removed, folder.parent, run),
            )
        self._writers.move_to_end(run)
        return self._writers[run]

    def _give_up(self, run: WaitingRun, ids: Sequence[str], error: OSError) -> None:
        self._metrics.archive_lost.inc(len(ids))
        if run.run_id not in self._failing:
            self._failing.add(run.run_id)
            _LOG.error(
                "THE ARCHIVE OF RUN %s CANNOT BE WRITTEN [archive_lost] (%s). Training continues; its groups are "
                "trained on and NOT archived until %s can be written. gristmill_api_archive_lost counts them.",
                run.run_id,
                error,
                self._runs_dir,
            )

    async def _discard(self, run: WaitingRun) -> None:
        writer = self._writers.pop(run, None)
        if writer is not None:
            with contextlib.suppress(OSError):  # sync or append reported the error.
                await asyncio.to_thread(writer.close)

    async def _close(self) -> None:
        for run in list(self._writers):
            await self._discard(run)


def _drops(run: WaitingRun, fates: Sequence[bytes]) -> list[Drop]:
    """Returns the drops that can be read. The others are logged and left out."""
    drops = []
    for fate in fates:
        try:
            drops.append(_drop(run, fate))
        except ValueError as error:
            _LOG.error(line("archive", run=run.run_id, file=DROPS_FILE, fate=fate[:200], why=str(error)))
    return drops


def _drop(run: WaitingRun, fate: bytes) -> Drop:
    """`fate`: as log_fate of _moves.lua writes it, with numbers as text."""
    fields = msgspec.json.decode(fate, type=dict[str, Any])
    added = {"creation": run.created_ms, "row": _row(str(fields.get("group_id")))}
    return msgspec.convert({**fields, **added}, Drop, strict=False)


def _report_removed(folder: Path, run: WaitingRun, ids: Sequence[str], bound: str) -> None:
    """Records the groups of a segment that the archive removes to keep a bound."""
    at = int(time.time() * 1000)
    append_drops(
        folder,
        [
            Drop(creation=run.created_ms, group_id=one, row=_row(one), what="let_go", reason=bound, time_ms=at)
            for one in ids
        ],
    )


def _row(group_id: str) -> int:
    try:
        return keys.row_of(group_id)
    except ValueError:
        return -1


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
