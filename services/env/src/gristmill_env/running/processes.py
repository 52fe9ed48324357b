"""A pool of checker processes. A check that goes on for too long costs its process, and nothing else.

Each process has a thread that hands it one check at a time, waits for its verdict, and replaces it
when it overran, died or grew too large. Threads and plain futures, so that any event loop and any
thread can ask. Nothing starts before the first check.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from gristmill_env.symbolic.errors import CheckError, CheckerUnavailable, CheckOverran, TooManyChecks
from gristmill_env.symbolic.process import CheckerProcess
from gristmill_env.symbolic.protocol import Check, Outcome

_WAITING = 65_536
_REMEMBERED_S = 60.0
"""For how long a check that overran is refused when it comes again, as it does in a group of like completions."""
_REMEMBERED = 256


@dataclass(frozen=True, eq=False)
class _Job:
    check: Check
    future: Future[Outcome] = field(default_factory=Future)


class SymbolicPool:
    """Decides checks in `size` processes, each within `deadline_s` seconds of wall time."""

    def __init__(self, size: int = 2, deadline_s: float = 3.0) -> None:
        self._size = size
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._processes: set[CheckerProcess] = set()
        self._overran: dict[Check, float] = {}
        self._idle = 0
        self._closed = False
        self._asked = 0

    @property
    def asked(self) -> int:
        """Checks that the pool was ever asked for."""
        return self._asked

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        with self._changed:
            return [process.pid for process in self._processes if process.alive]

    async def check(self, pairs: Iterable[tuple[str, str]], tolerance: float = 0.0) -> Outcome:
        """Whether in all `pairs` the stated LaTeX is the same as the reference LaTeX, which comes first.

        Raises CheckError, or one of its kinds, when that could not be found out.
        """
        return await asyncio.wrap_future(self.submit(pairs, tolerance))

    def submit(self, pairs: Iterable[tuple[str, str]], tolerance: float = 0.0) -> Future[Outcome]:
        """As `check`, for callers without an event loop."""
        job = _Job(Check(tuple(pairs), tolerance))
        with self._changed:
            self._asked += 1
            refusal = self._refusal(job.check)
            if refusal is None:
                self._waiting.append(job)
                if len(self._waiting) > self._idle and len(self._threads) < self._size:
                    self._start_thread()
                self._changed.notify()
        if refusal is not None:
            job.future.set_exception(refusal)
        return job.future

    def close(self) -> None:
        """Kill the processes. Checks that wait or run end with CheckError."""
        with self._changed:
            self._closed = True
            threads, waiting = list(self._threads), list(self._waiting)
            self._waiting.clear()
            for process in self._processes:
                process.stop()
            self._changed.notify_all()
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(CheckError("the pool of symbolic checks was closed"))
        for thread in threads:
            thread.join()

    def _refusal(self, check: Check) -> CheckError | None:
        if self._closed:
            return CheckError("the pool of symbolic checks is closed")
        if len(self._waiting) >= _WAITING:
            return TooManyChecks(f"{_WAITING} symbolic checks wait already; score fewer completions at once")
        if self._overran.get(check, 0.0) > time.monotonic():
            return CheckOverran(f"the check of {check.shown} took more than {self._deadline_s:g} s a moment ago")
        return None

    def _start_thread(self) -> None:
        name = f"symbolic-{len(self._threads)}"
        self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
        self._threads[-1].start()

    def _work(self) -> None:
        process: CheckerProcess | None = None
        while self._await_job():
            process = self._living(process)
            try:
                process = process or self._start_process()  # before a job is taken: another process may be free first
            except CheckerUnavailable as error:
                if job := self._take():
                    job.future.set_exception(error)
                continue
            if job := self._take():
                self._decide(job, process)
        if process is not None:
            process.kill()

    def _decide(self, job: _Job, process: CheckerProcess) -> None:
        try:
            outcome = process.ask(job.check)
        except CheckError as error:
            if isinstance(error, CheckOverran):
                self._remember(job.check)
            job.future.set_exception(error)
        else:
            job.future.set_result(outcome)

    def _await_job(self) -> bool:
        """Wait for a job that can be taken; false when the pool is closed."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._idle -= 1
            return not self._closed

    def _take(self) -> _Job | None:
        """The job that has waited longest and is still wanted."""
        with self._changed:
            while self._waiting:
                job = self._waiting.popleft()
                if job.future.set_running_or_notify_cancel():
                    return job
        return None

    def _start_process(self) -> CheckerProcess:
        process = CheckerProcess(self._deadline_s)
        with self._changed:
            self._processes.add(process)
        process.await_ready()
        return process

    def _living(self, process: CheckerProcess | None) -> CheckerProcess | None:
        """`process`, or None when it has ended: killed for its check, or by somebody else meanwhile."""
        with self._changed:
            self._processes = {one for one in self._processes if one.alive}
        if process is None or process.alive:
            return process
        process.kill()
        return None

    def _remember(self, check: Check) -> None:
        with self._changed:
            while len(self._overran) >= _REMEMBERED:
                del self._overran[next(iter(self._overran))]
            self._overran[check] = time.monotonic() + _REMEMBERED_S


_lock = threading.Lock()
_shared: SymbolicPool | None = None


def symbolic_pool() -> SymbolicPool:
    """The pool of this process, which all rewards share."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = SymbolicPool()
            atexit.register(_shared.close)
        return _shared


def _forget_shared_pool() -> None:
    """A forked child has none of its parent's threads: it needs a pool of its own."""
    global _lock, _shared
    _lock, _shared = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_shared_pool)
