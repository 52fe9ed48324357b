"""Runs calls of third-party code, and watches them.

Plain calls run on worker threads, async calls on a thread with an event loop. Another thread watches both kinds, so
that the runner works in the same way for callers with and without an event loop:

- If a call overruns its limits, the call fails, and the runner abandons its thread.
- If an event loop is blocked, the runner abandons the loop, and the blocking call fails. Repeatable calls on that loop
  run again on a new loop. Later calls with the name of the blocking call get a separate loop.
- If too many abandoned threads still hang, the runner ends the run.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from gristmill import GristmillError
from gristmill_env.errors import EnvError, RewardError
from gristmill_env.running.calls import Batch, Call, CallError, Limits
from gristmill_env.running.threads import LoopThread, Workers

MOST_HANGING = 16
"""Number of threads that may hang forever. One more hanging thread ends the run."""

_TICK = 0.02
"""Seconds between two checks of running calls."""
_LINGER = 1.0
"""Seconds without a call after which the watching thread sleeps. Waking it costs as much as a call."""
_SUSPENDED = 0.5
"""Seconds. After a tick this late the watch judges no call for a while: the process was stopped, or code held the
GIL."""
_RECOVERY = 1.0
"""Seconds after such a tick in which calls can end and event loops can answer."""


class Runner:
    """Threads for calls, started with the first call. They block neither the caller nor the interpreter's exit."""

    def __init__(
        self,
        limits: Limits,
        *,
        threads: int = 32,
        what: str = "reward",
        error: type[EnvError] = RewardError,
        remedy: str = "set process: true for it, or a time-out on what it waits for",
    ) -> None:
        """`threads`: maximum for plain calls. `what`, `error`, `remedy`: wording and class of the error that ends
        the run."""
        self._limits = limits
        self._what, self._error, self._remedy = what, error, remedy
        self._workers = Workers(threads)
        self._loop: LoopThread | None = None
        self._own_loops: dict[str, LoopThread] = {}
        """Separate loops, by name, of calls that have blocked the shared loop."""
        self._batches: set[Batch] = set()
        self._changed = threading.Condition()
        self._watcher: threading.Thread | None = None
        self._asleep = False
        self._hanging: dict[threading.Thread, bool] = {}
        """Abandoned threads that still run, and whether each was interrupted."""
        self._fatal: BaseException | None = None
        self._closed = False

    def submit(self, calls: Iterable[Call[Any]]) -> Batch:
        """Begins these calls. The batch is done when all calls are settled. A batch's error has the class `error`.

        Raises that class of error when too many threads hang, or after close().
        """
        batch = Batch(calls)
        with self._changed:
            if self._fatal is not None:
                if isinstance(self._fatal, GristmillError):
                    raise self._error(self._fatal.code, str(self._fatal), **self._fatal.values) from self._fatal
                raise self._error("watch_failed", str(self._fatal)) from self._fatal
            if self._closed:
                raise self._closing()
            if not batch.calls:
                return batch
            self._batches.add(batch)
            batch.done.add_done_callback(lambda _: self._batches.discard(batch))
            self._workers.submit(call for call in batch.calls if not call.is_async)
            self._on_loops(call for call in batch.calls if call.is_async)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="call-watch", daemon=True)
                self._watcher.start()
            if self._asleep:
                self._changed.notify()
        return batch

    def drop(self, batch: Batch) -> None:
        """Drops calls whose results are no longer needed: queued calls do not begin, and async calls are cancelled."""
        for call in batch.calls:
            call.needed = False
        with self._changed:
            for loop in self._loops():
                loop.cancel(call for call in batch.calls if call.is_async)

    def close(self) -> None:
        """Ends the threads without waiting for them. Running async calls are cancelled."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._workers.close()
            for loop in self._loops():
                loop.close()
            for batch in list(self._batches):
                batch.fail(self._closing())
            self._changed.notify()

    def _closing(self) -> EnvError:
        return self._error("runner_closed", f"the runner of the {self._what}s is closed", what=self._what)

    def _loops(self) -> list[LoopThread]:
        return [*([self._loop] if self._loop is not None else []), *self._own_loops.values()]

    def _on_loops(self, calls: Iterable[Call[Any]]) -> None:
        common = []
        for call in calls:
            if call.name in self._own_loops:
                self._own_loops[call.name].submit([call])
            else:
                common.append(call)
        if common:
            if self._loop is None:
                self._loop = LoopThread(self._limits)
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
                self._interrupt_hanging()
                now = time.monotonic()
                if now - before > _SUSPENDED:
                    judged_from = now + _RECOVERY
                if now >= judged_from:
                    self._judge(now)
                self._workers.grow(now)
                before = now
                last_busy = now if self._batches or self._hanging else last_busy
        except BaseException as error:
            self._end(error)  # without the watch, no limit is enforced
            raise

    def _judge(self, now: float) -> None:
        for call, thread, why in self._workers.overdue(now, self._limits):
            self._give_up(thread, call.name)
            call.publish(call.failed(why))
        with self._changed:
            silent = [loop for loop in self._loops() if loop.busy and loop.ask(now)]
            for loop in silent:
                self._replace(loop)

    def _replace(self, loop: LoopThread) -> None:
        blocking, calls = loop.give_up()
        if loop is self._loop:
            self._loop = None
        self._own_loops = {name: own for name, own in self._own_loops.items() if own is not loop}
        seconds = min(self._limits.cpu, self._limits.wall)
        if blocking is None:
            why = CallError(
                "loop_blocked",
                f"the event loop of the {self._what}s was blocked for {seconds:g} s by code that belongs to no task",
                seconds=seconds,
            )
            self._give_up(loop.thread, " or ".join(sorted({call.name for call in calls})))
            for call in calls:
                call.settle(call.failed(why))
            return
        name = blocking.name
        mine = blocking.claim()  # False if the call was settled before: then a task that it left behind blocks
        self._give_up(loop.thread, name)
        if mine:
            why = CallError(
                "loop_blocked",
                f"it blocked its event loop for {seconds:g} s; await what it waits for, or use def",
                seconds=seconds,
            )
            blocking.publish(blocking.failed(why))
        self._own_loops[name] = LoopThread(self._limits)
        for call in calls:
            if call.begun and not call.repeatable:
                call.settle(call.failed(CallError("loop_lost", f"its event loop was blocked by {name}", by=name)))
        self._on_loops(call for call in calls if call.is_open)

    def _give_up(self, thread: threading.Thread, name: str) -> None:
        self._hanging[thread] = False
        self._interrupt_hanging()
        if len(self._hanging) > MOST_HANGING:
            self._end(
                self._error(
                    "too_many_hanging",
                    f"{self._what} '{name}' hangs: {len(self._hanging)} threads are lost in calls that overran their "
                    f"limits ({self._limits}); {self._remedy}",
                    name=name,
                    threads=len(self._hanging),
                )
            )

    def _interrupt_hanging(self) -> None:
        """Interrupts abandoned threads. Threads in Python code end at once, threads in C code when the C call returns.

        A thread is interrupted only while it runs code of the call itself. Inside the standard library the thread might
        hold a lock that all threads need, for example the lock of logging or of an import.
        """
        self._hanging = {thread: done for thread, done in self._hanging.items() if thread.is_alive()}
        for thread, done in self._hanging.items():
            if done or thread.ident is None:
                continue
            time.sleep(0)  # start a new turn with the GIL: no other thread runs between the next two lines
            if _in_own_code(sys._current_frames().get(thread.ident)):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
                self._hanging[thread] = True

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._fatal = error
            for batch in list(self._batches):
                batch.fail(error)


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_PACKAGES = ("site-packages", "dist-packages")


def _in_own_code(frame: FrameType | None) -> bool:
    """Whether a thread with this innermost frame runs the code of a call. The standard library, which the call may use,
    and the event loop and the worker, which run the call, are not code of the call."""
    own = False
    while frame is not None:
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if module.startswith((f"{__package__}.", "asyncio.")):
            return own
        if file.startswith("<frozen"):
            return False
        if file.startswith(_STANDARD_LIBRARY) and not any(part in file for part in _PACKAGES):
            return False
        own = True
        frame = frame.f_back
    return False
