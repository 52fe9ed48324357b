"""Daemon threads for rewards that are not async. One that hangs is given up, and another takes its place.

`concurrent.futures.ThreadPoolExecutor` will not do: its threads hold up the interpreter's exit, and one that hangs
keeps its place for ever.

How many threads: cheap calls queue for one, which takes a whole group's in one go. Calls that wait (for a judge, a
database) get more and more threads. Calls that compute do not, for each thread more makes everybody wait longer for
the interpreter's lock, the environment's event loop included.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

from gristmill_env.rewards.running.calls import Call

MOST = 32
"""Threads at a time, those that are given up not counted."""
MOST_COMPUTING = 2
"""Threads that one reward may compute on; its other calls wait, those of other rewards pass them."""
STUCK = 1.0
"""Seconds. A call that computes for longer counts no more for that: what waits behind it must not wait for its end."""
SLOW = 0.02
"""Seconds. Another thread comes only when all are in calls slower than this."""
_COMPUTES = 0.02
"""Share of its time that a slow call must be computing to count as such. Low: many may share one lock, and the machine
may be busy; a call that waits computes nothing."""


class _Worker:
    """A thread and what it does."""

    def __init__(self) -> None:
        self.busy: tuple[Call, float] | None = None
        """The call that runs and when it began, by time.monotonic()."""
        self.thread: threading.Thread
        self._seen: tuple[Call, float, float] | None = None

    def slow(self, now: float) -> Call | None:
        """The call that it is in, when that is a slow one."""
        busy = self.busy
        return busy[0] if busy is not None and now - busy[1] > SLOW else None

    def computes(self, now: float) -> Call | None:
        """The slow call that it is in, if that computes rather than waits, and is not stuck."""
        if (call := self.slow(now)) is None or (used := _cpu_seconds(self.thread)) is None:
            return None
        if self._seen is None or self._seen[0] is not call:
            self._seen = (call, now, used)
            return call  # as long as nothing is known
        seconds = now - self._seen[1]
        return call if seconds < STUCK and used - self._seen[2] > _COMPUTES * seconds else None


class Workers:
    """Calls in queues, one a reward, and as many threads as they need."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Call]] = OrderedDict()
        """By the reward's name; the one that was served last stands at the end."""
        self._held: frozenset[str] = frozenset()
        """Rewards that compute on as many threads as they may."""
        self._wanted = threading.Condition()
        self._workers: list[_Worker] = []
        self._idle = 0
        self._closed = False

    def submit(self, calls: Iterable[Call]) -> None:
        """Run the calls after those of the same reward that are queued."""
        with self._wanted:
            for call in calls:
                self._queues.setdefault(call.task.name, deque()).append(call)
            if self._idle:
                self._wanted.notify()
            elif not self._workers and self._queues:
                self._add()

    def grow(self, now: float) -> None:
        """Bring in a thread more when calls wait because all threads are slow."""
        with self._wanted:
            computing = Counter(call.task.name for worker in self._workers if (call := worker.computes(now)))
            self._held = frozenset(name for name, count in computing.items() if count >= MOST_COMPUTING)
            if not any(queue for name, queue in self._queues.items() if name not in self._held):
                return
            if self._idle:
                self._wanted.notify()
            elif len(self._workers) < MOST and all(worker.slow(now) for worker in self._workers):
                self._add()

    def overdue(self, now: float, timeout: float) -> list[tuple[Call, threading.Thread]]:
        """Give up threads whose call takes longer than `timeout` seconds.

        Returns the calls, claimed but not published, and their threads.
        """
        given_up = []
        for worker in list(self._workers):
            busy = worker.busy
            if busy is None or now - busy[1] <= timeout:
                continue
            if busy[0].claim():  # else it was in time after all, and its thread goes on
                with self._wanted:
                    self._workers.remove(worker)
                given_up.append((busy[0], worker.thread))
        return given_up

    def close(self) -> None:
        """Let the threads end once their call has."""
        with self._wanted:
            self._closed = True
            self._queues.clear()
            self._wanted.notify_all()

    def _add(self) -> None:
        worker = _Worker()
        worker.thread = threading.Thread(target=self._work, args=(worker,), name="reward", daemon=True)
        self._workers.append(worker)
        worker.thread.start()

    def _work(self, worker: _Worker) -> None:
        while (call := self._next()) is not None:
            worker.busy = (call, time.monotonic())
            if not call.settle(call.run()):
                return  # given up; it may be interrupted at any moment, so it touches no lock any more
            worker.busy = None

    def _next(self) -> Call | None:
        with self._wanted:
            while (call := self._take()) is None and not self._closed:
                self._idle += 1
                self._wanted.wait()
                self._idle -= 1
            return call

    def _take(self) -> Call | None:
        for name, queue in self._queues.items():
            if queue and name not in self._held:
                self._queues.move_to_end(name)
                return queue.popleft()
        return None


def _cpu_seconds(thread: threading.Thread) -> float | None:
    """What the thread has computed so far; None where that cannot be known: it has ended, or this is no Linux."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
    except (AttributeError, OSError):
        return None
