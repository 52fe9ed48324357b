"""A daemon thread with an event loop of its own, for rewards that are `async def`.

A reward that blocks the loop (`time.sleep` in place of `asyncio.sleep`) holds up all others on it. Who does is seen
from outside: the loop no longer answers, and the task that it is in belongs to a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, cast
from weakref import WeakKeyDictionary

from gristmill_env.rewards.running.calls import Call

_LATE = 0.25
"""Seconds. A timer that fires later than this was held up with its loop."""
_GOODBYE = 1.0
"""Seconds that cancelled calls have to clean up."""

_CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("call", default=None)


class LoopThread:
    """Runs calls of async rewards, all at a time, each under a deadline."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds that a call may take, and that the loop may be blocked."""
        self._timeout = timeout
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(cast(Any, self._owned_task))
        self._owner: WeakKeyDictionary[asyncio.Task[Any], Call | None] = WeakKeyDictionary()
        self._ending = False
        self._calls: dict[Call, None] = {}
        """Given to it and not ended, in this order."""
        self._timers: dict[Call, asyncio.TimerHandle] = {}
        self._asked: float | None = None
        self.thread = threading.Thread(target=self._run, name="reward-loop", daemon=True)
        self.thread.start()

    def submit(self, calls: Iterable[Call]) -> None:
        """Begin all of these calls."""
        calls = list(calls)
        self._calls.update(dict.fromkeys(calls))
        self._loop.call_soon_threadsafe(self._begin, calls)

    @property
    def busy(self) -> bool:
        """Whether calls are under way."""
        return bool(self._calls)

    def ask(self, now: float) -> bool:
        """Ask the loop for a sign of life, if none is outstanding. Returns whether it has been silent for too long."""
        asked = self._asked
        if asked is None:
            self._asked = now
            self._loop.call_soon_threadsafe(self._answer)
        return asked is not None and now - asked > self._timeout

    def give_up(self) -> tuple[Call | None, list[Call]]:
        """Stop as soon as it is free. Returns the call that blocks it, as far as can be known, and all that are open.

        To be called when it has been silent for too long: what it is in stands still.
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

    def _begin(self, calls: list[Call]) -> None:
        for call in calls:
            context = contextvars.copy_context()
            context.run(_CALL.set, call)
            self._loop.create_task(self._settle(call), context=context)

    async def _settle(self, call: Call) -> None:
        due = self._loop.time() + self._timeout
        self._timers[call] = self._loop.call_at(due, self._expire, call, asyncio.current_task(), due)
        try:
            outcomes = await call.run_async()
            if not self._ending:  # else it was cancelled by this thread's end, and is done again elsewhere
                call.settle(outcomes)
        finally:
            self._timers.pop(call).cancel()
            del self._calls[call]

    def _expire(self, call: Call, task: asyncio.Task[None] | None, due: float) -> None:
        late = self._loop.time() - due
        if self._ending:
            return
        if late > _LATE:  # the loop was held up by another: that time does not count
            due += 2 * late
            self._timers[call] = self._loop.call_at(due, self._expire, call, task, due)
        elif call.settle(call.failed(f"it took longer than {self._timeout:g} s")):
            assert task is not None
            task.cancel()
