"""Daemon threads that run calls. A hanging thread is abandoned and replaced, and delays no exit of this process.

`Workers` are threads for plain functions. Their number depends on the calls. Cheap calls queue for one thread, which
runs all calls of a group in sequence. Calls that wait (for a judge or a database) get additional threads. Calls that
compute do not, because each additional thread delays all others, including the service's event loop, at the
interpreter's lock.

`LoopThread` is a thread with an event loop for `async def` functions. A call that blocks the loop (`time.sleep` in
place of `asyncio.sleep`) delays all other calls on the loop. Another thread detects this: the loop no longer answers,
and its current task belongs to the call that blocks it.

`concurrent.futures.ThreadPoolExecutor` is not suitable: its threads delay the interpreter's exit, and a hanging thread
occupies its place in the pool forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

from gristmill_env.running.calls import Call, CallError, Limits

MOST_COMPUTING = 2
"""Number of threads on which calls of one name may compute. Further calls of that name wait; other names overtake
them."""
STUCK = 1.0
"""Seconds after which a computing call no longer counts as computing, so that the calls queued behind it can run."""
SLOW = 0.02
"""Seconds. The pool adds a thread only when all threads run calls slower than this."""
_COMPUTES = 0.02
"""Minimum share of its time that a slow call computes to count as computing. Low, because many threads may share one
lock and the machine may be busy. A call that waits computes nothing."""
_LATE = 0.25
"""Seconds. If a timer fires later than this, its loop was blocked."""
_GOODBYE = 1.0
"""Seconds that cancelled calls have to clean up."""
_AWAKE = 0.02
"""Minimum share of time that a loop must compute to count as awake. Low, because other threads hold the GIL, too."""

_CALL: contextvars.ContextVar[Call[Any] | None] = contextvars.ContextVar("call", default=None)


class Workers:
    """Queues of calls, one for each name, and the threads that the calls need."""

    def __init__(self, most: int) -> None:
        """`most`: maximum number of concurrent threads, without abandoned threads."""
        self._most = most
        self._queues: OrderedDict[str, deque[Call[Any]]] = OrderedDict()
        """Queues by call name. The name that was served last is at the end."""
        self._held: frozenset[str] = frozenset()
        """Names whose calls already compute on `MOST_COMPUTING` threads."""
        self._wanted = threading.Condition()
        self._workers: list[_Worker] = []
        self._idle = 0
        self._closed = False

    def submit(self, calls: Iterable[Call[Any]]) -> None:
        """Queues the calls, each after the queued calls of the same name."""
        with self._wanted:
            for call in calls:
                self._queues.setdefault(call.name, deque()).append(call)
            if self._idle:
                self._wanted.notify()
            elif not self._workers and self._queues:
                self._add()

    def grow(self, now: float) -> None:
        """Adds a thread when calls wait because all threads run slow calls."""
        with self._wanted:
            computing = Counter(call.name for worker in self._workers if (call := worker.computes(now)))
            self._held = frozenset(name for name, count in computing.items() if count >= MOST_COMPUTING)
            if not any(queue for name, queue in self._queues.items() if name not in self._held):
                return
            if self._idle:
                self._wanted.notify()
            elif len(self._workers) < self._most and all(worker.slow(now) for worker in self._workers):
                self._add()

    def overdue(self, now: float, limits: Limits) -> list[tuple[Call[Any], threading.Thread, CallError]]:
        """Abandons threads whose call has overrun its limits.

        Returns the calls, claimed but not published, with their threads and errors.
        """
        given_up = []
        for worker in list(self._workers):
            busy = worker.busy
            if busy is None:
                continue
            call, began, cpu_before = busy
            if now - began <= min(limits.cpu, limits.wall):  # a call's processor time never exceeds its elapsed time
                continue
            used = cpu_seconds(worker.thread)
            why = limits.overrun(None if used is None else used - cpu_before, now - began)
            if why is not None and call.claim():  # otherwise the call ended in time, and its thread continues
                with self._wanted:
                    self._workers.remove(worker)
                given_up.append((call, worker.thread, why))
        return given_up

    def close(self) -> None:
        """Lets each thread end after its current call."""
        with self._wanted:
            self._closed = True
            self._queues.clear()
            self._wanted.notify_all()

    def _add(self) -> None:
        worker = _Worker()
        worker.thread = threading.Thread(target=self._work, args=(worker,), name="call", daemon=True)
        self._workers.append(worker)
        worker.thread.start()

    def _work(self, worker: _Worker) -> None:
        while (call := self._next()) is not None:
            worker.busy = (call, time.monotonic(), time.thread_time())
            if not call.settle(call.run()):
                return  # this thread is abandoned and may be interrupted at any moment, so it takes no lock any more
            worker.busy = None

    def _next(self) -> Call[Any] | None:
        with self._wanted:
            while (call := self._take()) is None and not self._closed:
                self._idle += 1
                self._wanted.wait()
                self._idle -= 1
            return call

    def _take(self) -> Call[Any] | None:
        for name, queue in self._queues.items():
            if queue and name not in self._held:
                self._queues.move_to_end(name)
                return queue.popleft()
        return None


class _Worker:
    """A thread and its current call."""

    def __init__(self) -> None:
        self.busy: tuple[Call[Any], float, float] | None = None
        """The running call, and its start in time.monotonic() and in the thread's processor time."""
        self.thread: threading.Thread
        self._seen: tuple[Call[Any], float, float] | None = None

    def slow(self, now: float) -> Call[Any] | None:
        """Returns the current call if it is slow, else None."""
        busy = self.busy
        return busy[0] if busy is not None and now - busy[1] > SLOW else None

    def computes(self, now: float) -> Call[Any] | None:
        """Returns the current call if it is slow, computes rather than waits, and is not stuck; else None."""
        if (call := self.slow(now)) is None or (used := cpu_seconds(self.thread)) is None:
            return None
        if self._seen is None or self._seen[0] is not call:
            self._seen = (call, now, used)
            return call  # counts as computing until a second measurement
        seconds = now - self._seen[1]
        return call if seconds < STUCK and used - self._seen[2] > _COMPUTES * seconds else None


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
        return asleep > limit and used < _AWAKE * silent and not _wants_processor(self.thread)

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


def cpu_seconds(thread: threading.Thread) -> float | None:
    """Returns the thread's processor time so far; None if the thread has ended or the platform is not Linux."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
    except (AttributeError, OSError):
        return None


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
