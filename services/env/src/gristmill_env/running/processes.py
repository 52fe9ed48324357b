"""A pool of worker processes. If a job exceeds its limits, the pool kills only the job's process.

Each process has a thread that sends one job at a time and waits for the result. The thread replaces the process when
it overran, died or grew too large. The pool uses threads and plain futures, so that any event loop and any thread can
submit jobs. The pool starts no thread and no process before the first job.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from gristmill_env.errors import RewardError
from gristmill_env.running.child import HEAD, Done, Failed, Order, Report, decode_report, framed

_WAITING = 65_536
_REMEMBERED_S = 60.0
"""Seconds for which the pool refuses a job that overran. A group of similar completions repeats such jobs."""
_REMEMBERED = 256
_MODULE = "gristmill_env.running.child"
_START_S = 120.0
"""Seconds to start. Importing sympy takes one second, but many on a busy machine with a cold disk cache."""


class JobError(RewardError):
    """A job gave no result. The completion is therefore unscored; its score is never 0."""


class JobOverran(JobError):
    """The job exceeded a limit, and its process was killed."""


class JobDied(JobError):
    """The job's process exited during the job, for example because it used too much memory."""


class JobFailed(JobError):
    """The job raised an error."""


class NoProcess(JobError):
    """No process could be started for the job."""


class TooManyJobs(JobError):
    """The pool's queue of waiting jobs is full."""


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

        Raises JobError, or a subclass, when the job gives no result.
        """
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


class WorkerProcess:
    """A child process that does one job at a time. Not thread-safe: one thread owns it."""

    def __init__(self, order: Order, what: str, *, quiet: bool = False) -> None:
        """Starts the child. `what`: its purpose, for messages. `quiet`: the child's standard error is discarded.

        Raises NoProcess when the child cannot be started.
        """
        self._order, self._what = order, what
        self._command = command = [sys.executable, "-P", "-m", _MODULE]
        try:
            self._child = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if quiet else None,
                start_new_session=True,  # its own child processes are in its group and are killed with it
            )
        except OSError as error:
            raise NoProcess(
                "process_not_started",
                f"no process for {what} could be started: {error}",
                what=what,
                error=type(error).__name__,
            ) from error
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._jobs, self._reports = self._child.stdin, self._child.stdout
        self._poll = select.poll()
        self._poll.register(self._reports, select.POLLIN)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._child.poll() is None

    @property
    def pid(self) -> int:
        return self._child.pid

    def await_ready(self) -> None:
        """Sends the order, and waits until the process is warm. Raises NoProcess when the process cannot start."""
        try:
            self._send(framed(self._order))
            report = self._read(_START_S)
        except (OSError, EOFError, msgspec.DecodeError) as error:  # a TimeoutError is an OSError
            self.kill()
            raise NoProcess(
                "process_not_started",
                f"the process for {self._what} did not start ({_exit(self._child.returncode)}); is there memory left, "
                f"and does `{' '.join(self._command)} < /dev/null` work?",
                what=self._what,
                returncode=self._child.returncode,
            ) from error
        if isinstance(report, Failed):
            self.kill()
            raise NoProcess(
                report.code or "process_broken",
                f"the process for {self._what} cannot work: {report.reason}",
                **report.values,
            )

    def ask(self, job: bytes, shown: str) -> bytes:
        """Runs `job` and returns its result. `shown`: the job's name in messages.

        Raises JobOverran when the job exceeds a limit, and JobDied when the process exits during the job. After both
        errors the process is dead. Raises JobFailed when the job itself fails.
        """
        try:
            self._send(framed(job))
            report = self._read(self._order.wall)
        except TimeoutError:
            self.kill()
            wall = self._order.wall
            raise JobOverran(
                "job_overran", f"{shown} took more than {wall:g} s", job=shown, limit="wall", seconds=wall
            ) from None
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self.kill()
            if self._child.returncode == -signal.SIGPROF:
                cpu = self._order.cpu
                raise JobOverran(
                    "job_overran",
                    f"{shown} took more than {cpu:g} s of processor time",
                    job=shown,
                    limit="cpu",
                    seconds=cpu,
                ) from None
            raise JobDied(
                "job_died",
                f"the process of {shown} ended under it ({_exit(self._child.returncode)}); "
                "it may have needed more memory than there is",
                job=shown,
                returncode=self._child.returncode,
            ) from error
        if isinstance(report, Failed):
            raise JobFailed(report.code or "job_failed", f"{shown} failed: {report.reason}", **report.values)
        assert isinstance(report, Done)
        if report.last:
            self.kill()
        return report.result

    def stop(self) -> None:
        """Kills the process from a thread other than its owner's. The owner then finds the process dead."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the process has ended
            os.killpg(self._child.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kills the process and all processes that it has started, now."""
        self.stop()
        self._child.wait()
        self._jobs.close()
        self._reports.close()

    def _send(self, message: bytes) -> None:
        view = memoryview(message)
        while view:
            view = view[self._jobs.write(view) or 0 :]

    def _read(self, limit_s: float) -> Report:
        """Returns the next report. Raises TimeoutError after `limit_s` seconds, EOFError when the child has ended."""
        until = time.monotonic() + limit_s
        (size,) = HEAD.unpack(self._exactly(HEAD.size, until))
        return decode_report(self._exactly(size, until))

    def _exactly(self, size: int, until: float) -> bytes:
        read = b""
        while len(read) < size:
            if not self._poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError
            piece = os.read(self._reports.fileno(), size - len(read))
            if not piece:
                raise EOFError
            read += piece
        return read


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


@dataclass(frozen=True, eq=False)
class _Job:
    body: bytes
    shown: str
    future: Future[bytes] = field(default_factory=Future)

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.body).digest()


_POOLS: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()


atexit.register(_close_all)
# A forked child has none of its parent's threads, and must not end its parent's processes.
os.register_at_fork(after_in_child=_POOLS.clear)
