"""A daemon thread that runs an event loop for `async def` functions.

A call that blocks the loop (`time.sleep` in place of `asyncio.sleep`) delays all other calls on the loop. Another
thread detects this: the loop no longer answers, and its current task belongs to the call that blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import math
import threading
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

from gristmill_env.running.calls import Call, Limits
from gristmill_env.running.workers import cpu_seconds

_LATE = 0.25
"""Seconds. If a timer fires later than this, its loop was blocked."""
_GOODBYE = 1.0
"""Seconds that cancelled calls have to clean up."""
_COMPUTES = 0.02
"""Minimum share of time that a loop must compute to count as awake. Low, because other threads hold the GIL, too."""

_CALL: contextvars.ContextVar[Call[Any] | None] = contextvars.ContextVar("call", default=None)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Suspends the running call's limit while the call waits for work that has separate limits."""
    call = _CALL.get()
    if call is not None:
        call.held += 1
    try:
        yield
    finally:
        if call is not None:
            call.held -= 1


class LoopThread:
    """Runs async calls concurrently, each within its limits."""

    def __init__(self, limits: Limits) -> None:
        """`limits`: only `wall` limits a call, because the processor time of an async call is unknown. `cpu` limits how
        many seconds the loop may be blocked (seconds of processor time if the blocking call computes)."""
        self._limits = limits
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(cast(Any, self._owned_task))
        self._owner: WeakKeyDictionary[asyncio.Task[Any], Call[Any] | None] = WeakKeyDictionary()
        self._ending = False
        self._calls: dict[Call[Any], asyncio.Task[None] | None] = {}
        """Submitted calls that have not ended, in order of submission."""
        self._timers: dict[Call[Any], asyncio.TimerHandle] = {}
        self._asked: tuple[float, float | None, float] | None = None
        """State at the last unanswered ping: time.monotonic(), the thread's processor time and its queueing time."""
        self.thread = threading.Thread(target=self._run, name="call-loop", daemon=True)
        self.thread.start()

    def submit(self, calls: Iterable[Call[Any]]) -> None:
        """Begins all of these calls."""
        calls = list(calls)
        self._calls.update(dict.fromkeys(calls, None))
        self._loop.call_soon_threadsafe(self._begin, calls)

    @property
    def busy(self) -> bool:
        """Whether the loop has unfinished calls."""
        return bool(self._calls)

    def cancel(self, calls: Iterable[Call[Any]]) -> None:
        """Cancels these calls, whose results are no longer needed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the calls have ended
            self._loop.call_soon_threadsafe(self._cancel, list(calls))

    def ask(self, now: float) -> bool:
        """Pings the loop, unless a ping is unanswered. Returns whether the loop has not answered for too long."""
        if self._asked is None:
            self._asked = (now, cpu_seconds(self.thread), _queued_seconds(self.thread))
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answer)
            return False
        since, cpu_before, queued_before = self._asked
        silent, limit = now - since, self._limits.cpu
        if silent <= min(limit, self._limits.wall):
            return False
        used = cpu_seconds(self.thread)
        if used is None or cpu_before is None:
            return True
        used -= cpu_before
        if used > limit or silent > self._limits.wall:
            return True
        asleep = silent - used - (_queued_seconds(self.thread) - queued_before)
        return asleep > limit and used < _COMPUTES * silent and not _wants_processor(self.thread)

    def give_up(self) -> tuple[Call[Any] | None, list[Call[Any]]]:
        """Stops the loop as soon as it is free. Returns the call that blocks the loop, if known, and all open calls.

        Call this only when `ask` has returned True, because the loop's current task does not change then.
        """
        self._ending = True
        task = asyncio.current_task(self._loop)
        blocking = self._owner.get(task) if task is not None else None
        self._loop.call_soon_threadsafe(self._loop.stop)
        return blocking, [call for call in list(self._calls) if call.is_open]

    def close(self) -> None:
        """Cancels all calls and ends the thread, without waiting for it."""
        self._ending = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _answer(self) -> None:
        self._asked = None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._ending:
                with contextlib.suppress(SystemExit):  # a reward may stop the loop or call sys.exit() in a task
                    self._loop.run_forever()
        finally:
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()  # one iteration, so that no pending stop is left
            if tasks := asyncio.all_tasks(self._loop):
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=_GOODBYE))
            self._loop.close()

    def _owned_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        """Creates a task and records the call that it belongs to. Tasks that a reward starts inherit the call."""
        task = asyncio.Task(coroutine, loop=loop, **options)
        context = options.get("context")
        self._owner[task] = _CALL.get() if context is None else context.get(_CALL)
        return task

    def _begin(self, calls: list[Call[Any]]) -> None:
        for call in calls:
            context = contextvars.copy_context()
            context.run(_CALL.set, call)
            self._calls[call] = task = self._loop.create_task(self._settle(call), context=context)
            task.add_done_callback(functools.partial(self._forget, call))

    def _forget(self, call: Call[Any], task: asyncio.Task[None]) -> None:
        del self._calls[call]
        if (timer := self._timers.pop(call, None)) is not None:
            timer.cancel()
        if not self._ending and call.is_open:  # it was cancelled before it began
            call.settle(call.not_needed())

    def _cancel(self, calls: list[Call[Any]]) -> None:
        for call in calls:
            if (task := self._calls.get(call)) is not None:
                task.cancel()

    async def _settle(self, call: Call[Any]) -> None:
        due = self._loop.time() + self._limits.wall
        self._timers[call] = self._loop.call_at(due, self._expire, call, asyncio.current_task(), due)
        call.begun = True
        result = await call.run_async()
        if not self._ending:  # otherwise the end of this thread cancelled the call, and it runs again elsewhere
            call.settle(result)

    def _expire(self, call: Call[Any], task: asyncio.Task[None] | None, due: float) -> None:
        late = self._loop.time() - due
        if self._ending:
            return
        if call.held or late > _LATE:  # if late, another call blocked the loop: that time does not count
            due += self._limits.wall if call.held else 2 * late
            self._timers[call] = self._loop.call_at(due, self._expire, call, task, due)
        elif (why := self._limits.overrun(None, math.inf)) is not None and call.settle(call.failed(why)):
            assert task is not None
            task.cancel()


def _wants_processor(thread: threading.Thread) -> bool:
    """Whether the thread is running or runnable now; False if the platform does not report it."""
    try:
        return Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False


def _queued_seconds(thread: threading.Thread) -> float:
    """Returns the seconds that the thread was runnable but had no processor; 0 if the platform does not report them.
    A wait that is still in progress is not included."""
    try:
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
