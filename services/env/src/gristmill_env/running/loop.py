"""A daemon thread with an event loop of its own, for functions that are `async def`.

A call that blocks the loop (`time.sleep` in place of `asyncio.sleep`) holds up all others on it. That is seen from
outside: the loop no longer answers, and the task that it is in belongs to the call that blocks it.
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
"""Seconds. A timer that fires later than this was held up with its loop."""
_GOODBYE = 1.0
"""Seconds that cancelled calls have to clean up."""
_COMPUTES = 0.02
"""Share of its time that a loop which is not asleep must be computing. Low: others have the interpreter's lock, too."""

_CALL: contextvars.ContextVar[Call[Any] | None] = contextvars.ContextVar("call", default=None)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """The call that is running waits for work with limits of its own: while it does, its own limit does not count."""
    call = _CALL.get()
    if call is not None:
        call.held += 1
    try:
        yield
    finally:
        if call is not None:
            call.held -= 1


class LoopThread:
    """Runs async calls, all at a time, each within its limits."""

    def __init__(self, limits: Limits) -> None:
        """`limits`: of a call `wall` alone, since nobody knows its processor time. The loop may be blocked for `cpu`
        seconds, of processor time if the call that blocks it computes."""
        self._limits = limits
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(cast(Any, self._owned_task))
        self._owner: WeakKeyDictionary[asyncio.Task[Any], Call[Any] | None] = WeakKeyDictionary()
        self._ending = False
        self._calls: dict[Call[Any], asyncio.Task[None] | None] = {}
        """Given to it and not ended, in this order."""
        self._timers: dict[Call[Any], asyncio.TimerHandle] = {}
        self._asked: tuple[float, float | None, float] | None = None
        """When it was asked for a sign of life: time.monotonic(), and the thread's times of computing and queueing."""
        self.thread = threading.Thread(target=self._run, name="call-loop", daemon=True)
        self.thread.start()

    def submit(self, calls: Iterable[Call[Any]]) -> None:
        """Begin all of these calls."""
        calls = list(calls)
        self._calls.update(dict.fromkeys(calls, None))
        self._loop.call_soon_threadsafe(self._begin, calls)

    @property
    def busy(self) -> bool:
        """Whether calls are under way."""
        return bool(self._calls)

    def cancel(self, calls: Iterable[Call[Any]]) -> None:
        """End these calls; nobody waits for them any more."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: they have ended
            self._loop.call_soon_threadsafe(self._cancel, list(calls))

    def ask(self, now: float) -> bool:
        """Ask the loop for a sign of life, if none is outstanding. Returns whether it has been silent for too long."""
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
        """Stop as soon as it is free. Returns the call that blocks it, as far as can be known, and all that are open.

        To be called when it has been silent for too long: its current task does not change then.
        """
        self._ending = True
        task = asyncio.current_task(self._loop)
        blocking = self._owner.get(task) if task is not None else None
        self._loop.call_soon_threadsafe(self._loop.stop)
        return blocking, [call for call in list(self._calls) if call.is_open]

    def close(self) -> None:
        """Cancel all calls and end the thread, without waiting for it."""
        self._ending = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _answer(self) -> None:
        self._asked = None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._ending:
                with contextlib.suppress(SystemExit):  # a reward may stop the loop, or call sys.exit() in a task
                    self._loop.run_forever()
        finally:
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()  # once round, so that no stop is left over
            if tasks := asyncio.all_tasks(self._loop):
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=_GOODBYE))
            self._loop.close()

    def _owned_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        """A task factory that notes whose call a task belongs to; tasks that a reward starts inherit it."""
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
        if not self._ending:  # else it was cancelled by this thread's end, and is done again elsewhere
            call.settle(result)

    def _expire(self, call: Call[Any], task: asyncio.Task[None] | None, due: float) -> None:
        late = self._loop.time() - due
        if self._ending:
            return
        if call.held or late > _LATE:  # in the latter case the loop was held up by another: that time does not count
            due += self._limits.wall if call.held else 2 * late
            self._timers[call] = self._loop.call_at(due, self._expire, call, task, due)
        elif (why := self._limits.overrun(None, math.inf)) is not None and call.settle(call.failed(why)):
            assert task is not None
            task.cancel()


def _wants_processor(thread: threading.Thread) -> bool:
    """Whether the thread computes, or would if it had a processor, now; False if the platform does not say."""
    try:
        return Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False


def _queued_seconds(thread: threading.Thread) -> float:
    """For how long the thread had no processor though it wanted one; 0 if the platform does not say. A wait that lasts
    is not in it yet."""
    try:
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
