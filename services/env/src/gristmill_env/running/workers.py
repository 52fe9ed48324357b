"""Daemon threads for plain functions. A hanging thread is abandoned and replaced.

`concurrent.futures.ThreadPoolExecutor` is not suitable: its threads delay the interpreter's exit, and a hanging thread
occupies its place in the pool forever.

The number of threads depends on the calls. Cheap calls queue for one thread, which runs all calls of a group in
sequence. Calls that wait (for a judge or a database) get additional threads. Calls that compute do not, because each
additional thread delays all others, including the service's event loop, at the interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from gristmill_env.running.calls import Call, Limits
from gristmill_env.running.errors import CallError

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


def cpu_seconds(thread: threading.Thread) -> float | None:
    """Returns the thread's processor time so far; None if the thread has ended or the platform is not Linux."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
    except (AttributeError, OSError):
        return None
