"""Calls within limits: `async` code on this event loop, plain code in threads. A call that has overrun gives a
`CallError`, whether it ends or not."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gristmill_env.errors import EnvError
from gristmill_env.running.daemon import DaemonExecutor

T = TypeVar("T")

_GRACE = 5.0
"""Seconds that a call has to end after it was given up, or its limit if that is shorter. After that it hangs."""
_SLOW = 0.02
"""Seconds after which calls that wait get more threads: twice as many each time."""
_LATE = 0.25
"""Seconds. If a timer fires later than this, code blocked the event loop, and results may wait behind the timer."""


class CallError(EnvError):
    """A call gave no result: it exceeded its limits, or blocked its event loop."""


@dataclass(frozen=True)
class Limits:
    """How long a call may take. Other work on the machine does not use up a call's processor time."""

    cpu: float
    """Seconds of processor time. A call that computes for longer has overrun."""
    wall: float
    """Elapsed seconds, for a call that sleeps or waits for an event that never happens."""

    def overrun(self, cpu: float | None, wall: float) -> CallError | None:
        """Returns the error of a call that took this many seconds; None if the call is within its limits.

        `cpu`: seconds of processor time; None if unknown. `wall`: elapsed seconds."""
        if cpu is not None and cpu > self.cpu:
            return CallError(
                "call_overran", f"it took longer than {self.cpu:g} s of processor time", limit="cpu", seconds=self.cpu
            )
        if wall > self.wall:
            return CallError("call_overran", f"it took longer than {self.wall:g} s", limit="wall", seconds=self.wall)
        return None


class Limiter:
    """Runs calls within limits, on one event loop."""

    def __init__(self, limits: Limits, threads: int, executor: Executor | None = None) -> None:
        """`threads`: maximum for plain calls, without those that have overrun. `executor`: has at least as many."""
        self._limits = limits
        self._executor = executor or DaemonExecutor()
        self._threads = asyncio.Semaphore(threads)
        self._given_up: dict[asyncio.Future[Any], float] = {}
        """Calls that may still run, with the time at which their result became useless."""

    @property
    def hangs(self) -> bool:
        """Whether a call has not ended although it was given up."""
        self._given_up = {call: since for call, since in self._given_up.items() if not call.done()}
        grace = min(_GRACE, self._limits.wall)
        return any(time.monotonic() - since > grace for since in self._given_up.values())

    async def on_loop(self, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | CallError]:
        """Runs these at the same time. Returns the result of each, or the error of a call that overran.

        The calls handle their own errors. If this is cancelled, so are they.
        """
        running = [asyncio.create_task(call) for call in calls]
        try:
            await _wait(running, self._limits.wall)
        finally:
            late = {task for task in running if not task.done()}
            for task in late:
                task.cancel()
                self._given_up[task] = time.monotonic()
        overran = self._limits.overrun(None, math.inf)
        assert overran is not None
        cancelled = CallError("call_cancelled", "it cancelled its own task")
        return [overran if task in late else cancelled if task.cancelled() else task.result() for task in running]

    async def in_threads(self, calls: Iterable[Callable[[], T]]) -> list[T | CallError]:
        """Makes plain calls. Returns the result of each, or the error of a call that overran.

        Makes them one after another in one thread, and in more threads if they take long. The calls handle their own
        errors. If this is cancelled, further calls do not begin.
        """
        crew = _Crew(calls)
        watched = asyncio.create_task(self._watched(crew))
        try:
            await asyncio.shield(watched)
        except asyncio.CancelledError:
            crew.waiting.clear()
            raise
        return [crew.results[at] for at in range(len(crew.results))]

    async def _watched(self, crew: _Crew[T]) -> None:
        threads: dict[asyncio.Future[None], _Worker[T]] = {}
        while crew.waiting or threads:
            for _ in range(min(len(crew.waiting), max(1, len(threads)))):
                if threads and self._threads.locked():
                    break
                await self._threads.acquire()
                worker = _Worker(crew)
                threads[asyncio.get_running_loop().run_in_executor(self._executor, worker.work)] = worker
            seconds_left = min(worker.left(self._limits) for worker in threads.values())
            if crew.waiting:  # as soon as there is a thread for them
                seconds_left = min(seconds_left, 10 * _SLOW if self._threads.locked() else _SLOW)
            await _wait(list(threads), seconds_left, asyncio.FIRST_COMPLETED)
            for future, worker in list(threads.items()):
                if not future.done():
                    if not worker.give_up(self._limits):
                        continue
                    self._given_up[future] = time.monotonic()
                del threads[future]
                self._threads.release()


class _Crew(Generic[T]):
    """Plain calls that some threads make."""

    def __init__(self, calls: Iterable[Callable[[], T]]) -> None:
        self.waiting = deque(enumerate(calls))
        self.running: dict[int, _Worker[T]] = {}
        """Which thread makes a call, by the call's number. Only who removes it sets its result."""
        self.results: dict[int, T | CallError] = {}


class _Worker(Generic[T]):
    """One thread of a crew."""

    def __init__(self, crew: _Crew[T]) -> None:
        self._crew = crew
        self._clock: int | None = None
        """The clock of the thread's processor time; None without such a clock, as on macOS."""
        self._call: tuple[int, float, float] | None = None
        """The number of the running call, and its start in time.monotonic() and in the thread's processor time."""

    def work(self) -> None:
        """Makes calls until none waits."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        while True:
            try:
                at, call = self._crew.waiting.popleft()
            except IndexError:
                return
            self._crew.running[at] = self
            self._call = (at, time.monotonic(), time.thread_time())
            result = call()
            if self._crew.running.pop(at, None) is None:
                return  # given up
            self._crew.results[at] = result

    def left(self, limits: Limits) -> float:
        """Returns the seconds after which the running call may have overrun."""
        used, passed = self._spent()
        return max(0.01, min(limits.cpu - (used or 0.0), limits.wall - passed))

    def give_up(self, limits: Limits) -> bool:
        """Fails the running call if it has overrun. Returns whether the thread makes no more calls of the crew."""
        call = self._call
        if call is None or (overran := limits.overrun(*self._spent())) is None:
            return False
        if self._crew.running.pop(call[0], None) is None:
            return False  # it has just ended
        self._crew.results[call[0]] = overran
        return True

    def _spent(self) -> tuple[float | None, float]:
        call = self._call
        if call is None:
            return None, 0.0
        passed = time.monotonic() - call[1]
        try:
            return None if self._clock is None else time.clock_gettime(self._clock) - call[2], passed
        except OSError:  # the thread has ended
            return None, passed


async def _wait(running: Sequence[asyncio.Future[Any]], seconds: float, until: str = asyncio.ALL_COMPLETED) -> None:
    """Waits until these have ended, for up to `seconds`, or longer if the event loop was blocked meanwhile."""
    due = time.monotonic() + seconds
    done, late = await asyncio.wait(running, timeout=seconds, return_when=until)
    if late and (delay := time.monotonic() - due) > _LATE and not (done and until == asyncio.FIRST_COMPLETED):
        await asyncio.wait(late, timeout=2 * delay, return_when=until)
