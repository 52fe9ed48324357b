"""A pool of processes that do one job at a time. A job that exceeds its limits costs only its own process.

The processes are `code_process.CodeProcess`es with `serve` of this module. Jobs run on the main thread, so that code
which uses signals works. The kernel kills the process when a job uses up its processor time.

One event loop of this process, in a thread, owns all pools, so that any event loop and any thread can submit jobs. A
pool starts no process before the first job.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import importlib
import os
import resource
import signal
import time
import weakref
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from gristmill_env.errors import RewardError
from gristmill_env.gather import gather
from gristmill_env.running.code_process import CodeError, CodeProcess, LostProcessError
from gristmill_env.running.daemon import loop_in_thread
from gristmill_env.running.host import Asking, Handler

_WAITING = 65_536
_REMEMBERED_S = 60.0
"""Seconds for which the pool refuses a job that overran. A group of similar completions repeats such jobs."""
_REMEMBERED = 256


class JobError(RewardError):
    """A job gave no result. The completion is therefore unscored; its score is never 0."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a process, and the resources that it may use."""

    target: str
    """ "package.module:factory". The factory takes `settings`, warms up, and returns the function that runs a job, from
    bytes to bytes."""
    settings: bytes = b""
    cpu: float
    """Seconds of processor time that a job may take. The kernel kills the process after that."""
    wall: float
    """Elapsed seconds that a job may take. The pool kills the process after that."""
    memory: int | None = None
    """Limit of the address space, in bytes."""
    grown: int | None = None
    """Resident bytes above which the process is replaced after its job, because the caches of parsers only grow."""
    niceness: int = 0


class ProcessPool:
    """Runs jobs in `size` processes. The processes end with this process or with the pool."""

    def __init__(self, spec: ProcessSpec, size: int, what: str, *, quiet: bool = False) -> None:
        """`spec`: the task and limits of the processes. `what`: their purpose, for messages. `quiet`: their standard
        error is discarded."""
        self._spec, self._what = spec, what
        settings = msgspec.msgpack.encode(spec)
        self._processes = [CodeProcess(f"{__name__}:serve", settings, what, quiet=quiet) for _ in range(size)]
        self._idle = list(self._processes)
        self._places = asyncio.Semaphore(size)
        self._jobs: set[_Job] = set()
        """Jobs that wait."""
        self._overran: dict[bytes, float] = {}
        self._closed = False
        self.asked = 0
        """Number of jobs that were ever submitted."""
        _POOLS.add(self)

    @property
    def pids(self) -> list[int]:
        """Process ids of the running processes."""
        return [pid for process in self._processes if (pid := process.pid) is not None]

    async def do(self, body: bytes, shown: str) -> bytes:
        """Returns the result of a job. `shown`: the job's name in messages, for example "the check of 'x'".

        Raises JobError when the job gives no result.
        """
        return await asyncio.wrap_future(self.submit(body, shown))

    def submit(self, body: bytes, shown: str) -> Future[bytes]:
        """Submits a job like `do`, for callers without an event loop."""
        self.asked += 1
        job = _Job(body, shown)
        if (refusal := self._refusal(job) or self._too_many()) is not None:
            job.result.set_exception(refusal)
            return job.result
        self._jobs.add(job)
        _loop().call_soon_threadsafe(lambda: job.begin(self._do(job)))
        return job.result

    def close(self) -> None:
        """Kills the processes. Waiting and running jobs end with JobError."""
        self._closed = True
        if self.asked:
            killed = gather(process.kill() for process in self._processes)
            asyncio.run_coroutine_threadsafe(killed, _loop()).result()

    def _refusal(self, job: _Job) -> JobError | None:
        if self._closed:
            return self._closing()
        if self._overran and self._overran.get(job.digest, 0.0) > time.monotonic():
            return JobError("job_overran_before", f"{job.shown} overran its limits a moment ago", job=job.shown)
        return None

    def _too_many(self) -> JobError | None:
        if len(self._jobs) < _WAITING:
            return None
        return JobError(
            "too_many_jobs",
            f"{_WAITING} jobs of {self._what} wait already; score fewer completions at once",
            what=self._what,
            waiting=_WAITING,
        )

    def _closing(self) -> JobError:
        return JobError("pool_closed", f"the pool of processes for {self._what} is closed", what=self._what)

    async def _do(self, job: _Job) -> None:
        async with self._places:
            self._jobs.discard(job)
            if not job.result.set_running_or_notify_cancel():
                return
            process = next((one for one in self._idle if one.pid is not None), self._idle[0])
            self._idle.remove(process)
            try:
                if (refusal := self._refusal(job)) is not None:
                    raise refusal
                job.result.set_result(await self._ask(process, job))
            except Exception as error:  # noqa: BLE001  it is the caller's
                job.result.set_exception(error)
            finally:
                self._idle.append(process)

    async def _ask(self, process: CodeProcess, job: _Job) -> bytes:
        if process.pid is None:
            await self._start(process)
        watch = asyncio.get_running_loop().call_later(self._spec.wall, lambda: job.begin(_end(process, job)))
        try:
            result, last = _DONE.decode(await process.call(job.body))
        except CodeError as error:
            code, values = _own(error)
            raise JobError(code or "job_failed", f"{job.shown} failed: {error.kind}: {error}", **values) from error
        except LostProcessError as error:
            status = await process.kill()
            if job.late:
                raise self._overran_error(job, "wall", self._spec.wall) from None
            if status == -signal.SIGPROF:
                raise self._overran_error(job, "cpu", self._spec.cpu) from None
            raise JobError(
                "job_died",
                f"the process of {job.shown} ended under it ({_exit(status)}); it may have needed more memory than "
                "there is",
                job=job.shown,
                returncode=status,
            ) from error
        finally:
            watch.cancel()
        if last:
            await process.kill()
        return result

    async def _start(self, process: CodeProcess) -> None:
        try:
            await process.start()
        except CodeError as error:
            code, values = _own(error)
            reason = f"the process for {self._what} cannot work: {error.kind}: {error}"
            raise JobError(code or "process_broken", reason, **values) from error
        except LostProcessError as error:
            raise JobError(error.code, f"{error}; is there memory left?", **error.values) from error
        if self._closed:
            await process.kill()
            raise self._closing()

    def _overran_error(self, job: _Job, limit: str, seconds: float) -> JobError:
        while len(self._overran) >= _REMEMBERED:
            del self._overran[next(iter(self._overran))]
        self._overran[job.digest] = time.monotonic() + _REMEMBERED_S
        kind = " of processor time" if limit == "cpu" else ""
        return JobError(
            "job_overran", f"{job.shown} took more than {seconds:g} s{kind}", job=job.shown, limit=limit,
            seconds=seconds,
        )  # fmt: skip


def _own(error: CodeError) -> tuple[str | None, Mapping[str, Any]]:
    """Returns the code and the values of an error of the job. The code is None if the error is not of Gristmill."""
    return (None, {"error": error.kind}) if error.raised else (error.code, error.values)


@dataclass(eq=False)
class _Job:
    body: bytes
    shown: str
    result: Future[bytes] = field(default_factory=Future)
    late: bool = False
    """Whether its process is killed because the job takes too long."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.body).digest()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts work on the job, on the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _end(process: CodeProcess, job: _Job) -> None:
    job.late = True
    await process.kill()


def _exit(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return loop_in_thread("processes")


_POOLS: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()


def _forget_all() -> None:
    """A forked child has none of its parent's threads, and must not end its parent's processes."""
    _POOLS.clear()
    _loop.cache_clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)


# --- In the process ---------------------------------------------------------------------------------------------

_SPECS = msgspec.msgpack.Decoder(ProcessSpec)
_DONE = msgspec.msgpack.Decoder(tuple[bytes, bool])
"""The result of a job, and whether the process has grown too large."""


def serve(settings: bytes) -> Handler:
    """Returns the handler of a process's jobs. `settings`: a `ProcessSpec`."""
    spec = _SPECS.decode(settings)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel kills the process without running Python code
    os.nice(spec.niceness)
    if spec.memory:
        resource.setrlimit(resource.RLIMIT_AS, (spec.memory, spec.memory))
    module, _, factory = spec.target.partition(":")
    work = getattr(importlib.import_module(module), factory)(spec.settings)

    async def handle(body: bytes, _ask: Asking) -> bytes:
        signal.setitimer(signal.ITIMER_PROF, spec.cpu)
        signal.setitimer(signal.ITIMER_REAL, 2 * spec.wall)  # in case the owner no longer watches
        try:
            result = work(body)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        return msgspec.msgpack.encode((result, spec.grown is not None and _resident() > spec.grown))

    return handle


def _resident() -> int:
    """Returns the bytes in memory now. Does not use ru_maxrss, because exec preserves the parent's value, which may
    be a large worker's."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except FileNotFoundError:  # not Linux: the memory limit ends the process in time
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
