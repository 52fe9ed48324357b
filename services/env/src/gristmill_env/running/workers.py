"""Daemon threads for plain functions. A thread that hangs is given up, and another takes its place.

`concurrent.futures.ThreadPoolExecutor` will not do: its threads hold up the interpreter's exit, and one that hangs
keeps its place for ever.

How many threads: cheap calls queue for one thread, which takes a whole group's in one go. Calls that wait (for a judge,
a database) get more and more threads. Calls that compute do not, because each further thread makes all others wait
longer for the interpreter's lock, the service's event loop included.
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
"""Threads that calls of one name may compute on; the others of that name wait, and those of other names pass them."""
STUCK = 1.0
"""Seconds after which a computing call no longer counts as one, so that the calls queued behind it can run."""
SLOW = 0.02
"""Seconds. Another thread comes only when all are in calls slower than this."""
_COMPUTES = 0.02
"""Share of its time that a slow call must be computing to count as such. Low: many may share one lock, and the machine
may be busy; a call that waits computes nothing."""


class _Worker:
    """A thread and its present call."""

    def __init__(self) -> None:
        self.busy: tuple[Call[Any], float, float] | None = None
        """The call that runs, when it began by time.monotonic(), and by the thread's processor time."""
        self.thread: threading.Thread
        self._seen: tuple[Call[Any], float, float] | None = None

    def slow(self, now: float) -> Call[Any] | None:
        """The call that it is in, when that is a slow one."""
        busy = self.busy
        return busy[0] if busy is not None and now - busy[1] > SLOW else None

    def computes(self, now: float) -> Call[Any] | None:
        """The slow call that it is in, if that computes rather than waits, and is not stuck."""
        if (call := self.slow(now)) is None or (used := cpu_seconds(self.thread)) is None:
            return None
        if self._seen is None or self._seen[0] is not call:
            self._seen = (call, now, used)
            return call  # as long as nothing is known
        seconds = now - self._seen[1]
        return call if seconds < STUCK and used - self._seen[2] > _COMPUTES * seconds else None


class Workers:
    """Calls in queues, one a name, and as many threads as they need."""

    def __init__(self, most: int) -> None:
        """`most`: threads at a time, those that are given up not counted."""
        self._most = most
        self._queues: OrderedDict[str, deque[Call[Any]]] = OrderedDict()
        """By the calls' name; the name that was served last is at the end."""
        self._held: frozenset[str] = frozenset()
        """Names whose calls compute on as many threads as they may."""
        self._wanted = threading.Condition()
        self._workers: list[_Worker] = []
        self._idle = 0
        self._closed = False

    def submit(self, calls: Iterable[Call[Any]]) -> None:
        """Run the calls after those of the same name that are queued."""
        with self._wanted:
            for call in calls:
                self._queues.setdefault(call.name, deque()).append(call)
            if self._idle:
                self._wanted.notify()
            elif not self._workers and self._queues:
                self._add()

    def grow(self, now: float) -> None:
        """Bring in a thread more when calls wait because all threads are slow."""
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
        """Give up threads whose call has overrun its limits.

        Returns the calls, claimed but not published, their threads, and their errors.
        """
        given_up = []
        for worker in list(self._workers):
            busy = worker.busy
            if busy is None:
                continue
            call, began, cpu_before = busy
            if now - began <= min(limits.cpu, limits.wall):  # no call computes for longer than it takes
                continue
            used = cpu_seconds(worker.thread)
            why = limits.overrun(None if used is None else used - cpu_before, now - began)
            if why is not None and call.claim():  # else it was in time after all, and its thread continues
                with self._wanted:
                    self._workers.remove(worker)
                given_up.append((call, worker.thread, why))
        return given_up

    def close(self) -> None:
        """Let the threads end once their call has."""
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
                return  # given up; it may be interrupted at any moment, so it touches no lock any more
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
    """Processor time of the thread so far; None if it has ended, or the platform does not say (it is not Linux)."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
    except (AttributeError, OSError):
        return None
