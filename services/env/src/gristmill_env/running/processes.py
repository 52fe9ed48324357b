"""A pool of worker processes. If a job exceeds its limits, the pool kills only the job's process.

Each process has a thread that sends one job at a time and waits for the result. The thread replaces the process when
it overran, died or grew too large. The pool uses threads and plain futures, so that any event loop and any thread can
submit jobs. The pool starts no thread and no process before the first job.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import os
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from gristmill_env.running.errors import JobError, JobOverran, NoProcess, TooManyJobs
from gristmill_env.running.loop import held
from gristmill_env.running.process import WorkerProcess
from gristmill_env.running.protocol import Order

_WAITING = 65_536
_REMEMBERED_S = 60.0
"""Seconds for which the pool refuses a job that overran. A group of similar completions repeats such jobs."""
_REMEMBERED = 256


@dataclass(frozen=True, eq=False)
class _Job:
    body: bytes
    shown: str
    future: Future[bytes] = field(default_factory=Future)

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.body).digest()


class ProcessPool:
    """Runs jobs in `size` processes. The processes end with this process or with the pool."""

    def __init__(self, order: Order, size: int, what: str, *, quiet: bool = False) -> None:
        """`order`: the task and limits of the processes. `what`: their purpose, for messages. `quiet`: their standard
        error is discarded."""
        self._order, self._size, self._what, self._quiet = order, size, what, quiet
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._processes: set[WorkerProcess] = set()
        self._overran: dict[bytes, float] = {}
        self._idle = 0
        self._closed = False
        self._asked = 0
        _POOLS.add(self)

    @property
    def asked(self) -> int:
        """Number of jobs that were ever submitted to the pool."""
        return self._asked

    @property
    def pids(self) -> list[int]:
        """Process ids of the running processes."""
        with self._changed:
            return [process.pid for process in self._processes if process.alive]

    async def do(self, body: bytes, shown: str) -> bytes:
        """Returns the result of a job. `shown`: the job's name in messages, for example "the check of 'x'".

        Raises JobError, or a subclass, when the job gives no result. While `do` waits, the limits of the calling reward
        do not count. The job has its own limits, and the reward did not cause the queueing.
        """
        with held():
            return await asyncio.wrap_future(self.submit(body, shown))

    def submit(self, body: bytes, shown: str) -> Future[bytes]:
        """Submits a job like `do`, for callers without an event loop."""
        job = _Job(body, shown)
        with self._changed:
            self._asked += 1
            refusal = self._refusal(job)
            if refusal is None:
                self._waiting.append(job)
                if len(self._waiting) > self._idle and len(self._threads) < self._size:
                    self._start_thread()
                self._changed.notify()
        if refusal is not None:
            job.future.set_exception(refusal)
        return job.future

    def close(self) -> None:
        """Kills the processes. Waiting and running jobs end with JobError."""
        with self._changed:
            self._closed = True
            threads, waiting = list(self._threads), list(self._waiting)
            self._waiting.clear()
            for process in self._processes:
                process.stop()
            self._changed.notify_all()
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(self._closing())
        for thread in threads:
            thread.join()

    def _refusal(self, job: _Job) -> JobError | None:
        if self._closed:
            return self._closing()
        if len(self._waiting) >= _WAITING:
            return TooManyJobs(
                "too_many_jobs",
                f"{_WAITING} jobs of {self._what} wait already; score fewer completions at once",
                what=self._what,
                waiting=_WAITING,
            )
        if self._overran and self._overran.get(job.digest, 0.0) > time.monotonic():
            return JobOverran("job_overran_before", f"{job.shown} overran its limits a moment ago", job=job.shown)
        return None

    def _closing(self) -> JobError:
        return JobError("pool_closed", f"the pool of processes for {self._what} is closed", what=self._what)

    def _start_thread(self) -> None:
        self._threads.append(threading.Thread(target=self._work, name=f"process-{len(self._threads)}", daemon=True))
        self._threads[-1].start()

    def _work(self) -> None:
        process: WorkerProcess | None = None
        while self._await_job():
            process = self._living(process)
            try:
                process = process or self._start_process()  # before taking a job: another process may be free first
            except NoProcess as error:
                if job := self._take():
                    job.future.set_exception(error)
                continue
            if job := self._take():
                self._do(job, process)
        if process is not None:
            process.kill()

    def _do(self, job: _Job, process: WorkerProcess) -> None:
        try:
            result = process.ask(job.body, job.shown)
        except JobError as error:
            if isinstance(error, JobOverran):
                self._remember(job)
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    def _await_job(self) -> bool:
        """Waits for a job. Returns False when the pool is closed."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._idle -= 1
            return not self._closed

    def _take(self) -> _Job | None:
        """Returns the job that has waited longest and is not cancelled; None if no such job waits."""
        with self._changed:
            while self._waiting:
                job = self._waiting.popleft()
                if job.future.set_running_or_notify_cancel():
                    return job
        return None

    def _start_process(self) -> WorkerProcess:
        process = WorkerProcess(self._order, self._what, quiet=self._quiet)
        with self._changed:
            self._processes.add(process)
            if self._closed:
                process.stop()
        process.await_ready()
        return process

    def _living(self, process: WorkerProcess | None) -> WorkerProcess | None:
        """Returns `process`, or None when it has ended because of its job or because another process killed it."""
        with self._changed:
            self._processes = {one for one in self._processes if one.alive}
        if process is None or process.alive:
            return process
        process.kill()
        return None

    def _remember(self, job: _Job) -> None:
        with self._changed:
            while len(self._overran) >= _REMEMBERED:
                del self._overran[next(iter(self._overran))]
            self._overran[job.digest] = time.monotonic() + _REMEMBERED_S


_POOLS: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()


atexit.register(_close_all)
# A forked child has none of its parent's threads, and must not end its parent's processes.
os.register_at_fork(after_in_child=_POOLS.clear)
