"""Runs calls of rewards, and keeps watch over them.

Rewards that are not async run on worker threads, async ones on a thread with an event loop. A thread of its own
watches both, so that it works alike for a caller with an event loop and one without:

- a call past its deadline is an error, and its thread is given up;
- a blocked event loop is given up: the call that blocks it is an error, the other calls on it are done again on a new
  one, and later calls of the reward that blocked get a loop for themselves;
- when too many given-up threads still hang, the run is ended.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable

from gristmill_env.errors import RewardError
from gristmill_env.rewards.running.calls import Batch, Call
from gristmill_env.rewards.running.loop import LoopThread
from gristmill_env.rewards.running.workers import Workers

TIMEOUT = 60.0
"""Seconds that a call of a reward may take, unless said otherwise."""
MOST_HANGING = 16
"""Threads that may hang for good; one more is the end of the run."""

_TICK = 0.02
"""Seconds between two looks at calls under way."""
_LINGER = 1.0
"""Seconds without a call after which the watch goes to sleep; waking it costs as much as a call."""
_SUSPENDED = 0.5
"""Seconds. After a tick this late nothing is judged for a while: the process stood still, or code held the GIL."""
_RECOVERY = 1.0
"""Seconds that calls have after that to end, and event loops to answer."""


class Runner:
    """Threads for rewards, from the first call on. They hold up neither the caller nor the interpreter's exit."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        """`timeout`: seconds that a call may take."""
        self._timeout = timeout
        self._workers = Workers()
        self._loop: LoopThread | None = None
        self._own_loops: dict[str, LoopThread] = {}
        """Of the rewards that have blocked the common one."""
        self._batches: set[Batch] = set()
        self._changed = threading.Condition()
        self._watcher: threading.Thread | None = None
        self._asleep = False
        self._hanging: list[threading.Thread] = []
        self._fatal: BaseException | None = None
        self._closed = False

    def submit(self, calls: Iterable[Call]) -> Batch:
        """Begin these calls. The batch is done when all of them are settled; its error is a RewardError.

        Raises RewardError when too many threads hang, or after close().
        """
        batch = Batch(calls)
        with self._changed:
            if self._fatal is not None:
                raise RewardError(str(self._fatal)) from self._fatal
            if self._closed:
                raise RewardError("the scorer is closed")
            if not batch.calls:
                return batch
            self._batches.add(batch)
            batch.done.add_done_callback(lambda _: self._batches.discard(batch))
            self._workers.submit(call for call in batch.calls if not call.task.is_async)
            self._on_loops(call for call in batch.calls if call.task.is_async)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="reward-watch", daemon=True)
                self._watcher.start()
            if self._asleep:
                self._changed.notify()
        return batch

    def close(self) -> None:
        """End the threads. Calls under way are cancelled where that is possible, and waited for by nobody."""
        with self._changed:
            self._closed = True
            self._workers.close()
            for loop in self._loops():
                loop.close()
            for batch in list(self._batches):
                batch.fail(RewardError("the scorer is closed"))
            self._changed.notify()

    def _loops(self) -> list[LoopThread]:
        return [*([self._loop] if self._loop is not None else []), *self._own_loops.values()]

    def _on_loops(self, calls: Iterable[Call]) -> None:
        common = []
        for call in calls:
            if call.task.name in self._own_loops:
                self._own_loops[call.task.name].submit([call])
            else:
                common.append(call)
        if common:
            if self._loop is None:
                self._loop = LoopThread(self._timeout)
            self._loop.submit(common)

    def _watch(self) -> None:
        try:
            before = last_busy = judged_from = time.monotonic()
            while not self._closed:
                with self._changed:
                    if self._batches or before - last_busy < _LINGER:
                        self._changed.wait(_TICK)
                    else:
                        self._asleep = True
                        self._changed.wait()
                        self._asleep = False
                        before = time.monotonic()
                now = time.monotonic()
                if now - before > _SUSPENDED:
                    judged_from = now + _RECOVERY
                if now >= judged_from:
                    self._judge(now)
                self._workers.grow(now)
                before = now
                last_busy = now if self._batches else last_busy
        except BaseException as error:
            self._end(error)  # nobody would keep a deadline any more
            raise

    def _judge(self, now: float) -> None:
        for call, thread in self._workers.overdue(now, self._timeout):
            self._give_up(thread, call.task.name)
            call.publish(call.failed(f"it took longer than {self._timeout:g} s"))
        with self._changed:
            silent = [loop for loop in self._loops() if loop.busy and loop.ask(now)]
            for loop in silent:
                self._replace(loop)

    def _replace(self, loop: LoopThread) -> None:
        blocking, calls = loop.give_up()
        if loop is self._loop:
            self._loop = None
        self._own_loops = {name: own for name, own in self._own_loops.items() if own is not loop}
        if blocking is None:
            why = f"the event loop of the rewards was blocked for {self._timeout:g} s by code that belongs to no task"
            self._give_up(loop.thread, " or ".join(sorted({call.task.name for call in calls})))
            for call in calls:
                call.settle(call.failed(why))
            return
        name = blocking.task.name
        mine = blocking.claim()  # not when it was settled before: then a task that it left behind blocks
        self._give_up(loop.thread, name)
        if mine:
            why = f"it blocked its event loop for {self._timeout:g} s; await what it waits for, or use def"
            blocking.publish(blocking.failed(why))
        self._own_loops[name] = LoopThread(self._timeout)
        self._on_loops(call for call in calls if call.is_open)

    def _give_up(self, thread: threading.Thread, reward: str) -> None:
        """Ask a thread to end. What runs in Python does, what waits in C does not before its wait is over."""
        if thread.is_alive() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        self._hanging = [other for other in self._hanging if other.is_alive()]
        self._hanging.append(thread)
        if len(self._hanging) > MOST_HANGING:
            self._end(
                RewardError(
                    f"reward '{reward}' hangs: {len(self._hanging)} threads are lost in calls that took longer than "
                    f"{self._timeout:g} s; give what it waits for a time-out of its own"
                )
            )

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._fatal = error
            for batch in list(self._batches):
                batch.fail(error)
