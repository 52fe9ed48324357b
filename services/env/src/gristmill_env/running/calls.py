"""A call of code that is not ours: a reward, a method of an environment."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gristmill_env.running.errors import CallError

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """How long a call may take. A machine that is busy with other work costs no call its limits."""

    cpu: float
    """Seconds of processor time. A call that computes for longer has overrun."""
    wall: float
    """Seconds in all, for a call that sleeps or waits for something that does not come."""

    def __str__(self) -> str:
        computing = "" if math.isinf(self.cpu) else f"{self.cpu:g} s of processor time, "
        return f"{computing}{self.wall:g} s in all"

    def overrun(self, cpu: float | None, wall: float) -> CallError | None:
        """Returns the error of a call that took this many seconds; None if the call is within its limits.

        `cpu`: None if nobody knows."""
        if cpu is not None and cpu > self.cpu:
            return CallError(
                "call_overran", f"it took longer than {self.cpu:g} s of processor time", limit="cpu", seconds=self.cpu
            )
        if wall > self.wall:
            return CallError("call_overran", f"it took longer than {self.wall:g} s", limit="wall", seconds=self.wall)
        return None


class Call(ABC, Generic[T]):
    """One call. It may be given up while it runs, and run again if it is `repeatable`; the first result counts."""

    def __init__(self, name: str, *, is_async: bool, repeatable: bool = True) -> None:
        """`name`: calls of one name queue for the same threads; it is what messages call it. `repeatable`: whether it
        may be begun once more when its event loop is lost."""
        self.name = name
        self.is_async = is_async
        self.repeatable = repeatable
        self.begun = False
        self.result: T
        """Once the call is settled."""
        self.batch: Batch | None = None
        self.needed = True
        """False if nobody waits for it any more, so that it need not begin."""
        self.held = 0
        """More than 0 while the call waits for work that has limits of its own: its own do not count then."""
        self._open = [True]

    @abstractmethod
    def run(self) -> T:
        """Run a plain call, on this thread. It raises nothing: what goes wrong is in the result."""

    @abstractmethod
    async def run_async(self) -> T:
        """Run an async call. It raises nothing: what goes wrong is in the result."""

    @abstractmethod
    def failed(self, why: BaseException) -> T:
        """The result of a call that failed. `why`: what the code raised, or a CallError."""

    def not_needed(self) -> T:
        """The result of a call that was not run, because nobody waits for it."""
        return self.failed(CallError("call_not_needed", "it is not needed any more"))

    @property
    def is_open(self) -> bool:
        """Whether it is not settled yet."""
        return bool(self._open)

    def claim(self) -> bool:
        """Whether the caller is the one to publish the result. Of several threads one is.

        Takes no lock: a thread that is given up may be interrupted here.
        """
        try:
            return self._open.pop()  # atomic
        except IndexError:
            return False

    def publish(self, result: T) -> None:
        """Settle it; for the one that has claimed it."""
        self.result = result
        if self.batch is not None:
            self.batch.one_less()

    def settle(self, result: T) -> bool:
        """Take this result, unless there is one. Returns whether it was taken."""
        if not self.claim():
            return False
        self.publish(result)
        return True


class Batch:
    """Calls that are waited for together."""

    def __init__(self, calls: Iterable[Call[Any]]) -> None:
        self.calls = list(calls)
        self.done: Future[None] = Future()
        """Done once every call is settled. Its error is one that ends the run."""
        self.done.set_running_or_notify_cancel()  # a waiter that goes away must not cancel it
        self._left = len(self.calls)
        self._lock = threading.Lock()
        for call in self.calls:
            call.batch = self
        if not self.calls:
            self.done.set_result(None)

    def one_less(self) -> None:
        """One of the calls is settled."""
        with self._lock:
            self._left -= 1
            if self._left == 0 and not self.done.done():
                self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Tell the waiter now that nothing will come of it."""
        with self._lock:
            if not self.done.done():
                self.done.set_exception(error)
