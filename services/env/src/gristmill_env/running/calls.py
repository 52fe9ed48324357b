"""A call of third-party code, for example a reward or a method of an environment."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from gristmill_env.running.limits import CallError, Limits

__all__ = ["Batch", "Call", "CallError", "Limits"]

T = TypeVar("T")


class Call(ABC, Generic[T]):
    """One call. The runner may abandon a running call, and run a `repeatable` call again. The first result counts."""

    def __init__(self, name: str, *, is_async: bool, repeatable: bool = True) -> None:
        """`name`: used in messages; calls with the same name share a queue. `repeatable`: whether the call may be
        started again when its event loop is lost."""
        self.name = name
        self.is_async = is_async
        self.repeatable = repeatable
        self.begun = False
        self.result: T
        """Set once the call is settled."""
        self.batch: Batch | None = None
        self.needed = True
        """False if no caller waits for the result any more, so that the call need not begin."""
        self.held = 0
        """More than 0 while the call waits for work with separate limits. The call's own limits do not count then."""
        self._open = [True]

    @abstractmethod
    def run(self) -> T:
        """Runs a plain call on this thread. Does not raise; errors are part of the result."""

    @abstractmethod
    async def run_async(self) -> T:
        """Runs an async call. Does not raise; errors are part of the result."""

    @abstractmethod
    def failed(self, why: BaseException) -> T:
        """Returns the result of a call that failed. `why`: the error that the code raised, or a CallError."""

    def not_needed(self) -> T:
        """Returns the result of a call that was not run because no caller waits for the result."""
        return self.failed(CallError("call_not_needed", "it is not needed any more"))

    @property
    def is_open(self) -> bool:
        """Whether the call is not settled yet."""
        return bool(self._open)

    def claim(self) -> bool:
        """Returns True to exactly one thread, which then publishes the result.

        Takes no lock, because an abandoned thread may be interrupted here.
        """
        try:
            return self._open.pop()  # atomic
        except IndexError:
            return False

    def publish(self, result: T) -> None:
        """Settles the call. Only the thread that claimed the call may do this."""
        self.result = result
        if self.batch is not None:
            self.batch.one_less()

    def settle(self, result: T) -> bool:
        """Settles the call with this result, unless the call has a result already. Returns whether it did."""
        if not self.claim():
            return False
        self.publish(result)
        return True


class Batch:
    """Calls whose results a caller waits for together."""

    def __init__(self, calls: Iterable[Call[Any]]) -> None:
        self.calls = list(calls)
        self.done: Future[None] = Future()
        """Done once every call is settled. An error of this future ends the run."""
        self.done.set_running_or_notify_cancel()  # a waiter that is cancelled must not cancel the batch
        self._left = len(self.calls)
        self._lock = threading.Lock()
        for call in self.calls:
            call.batch = self
        if not self.calls:
            self.done.set_result(None)

    def one_less(self) -> None:
        """Counts one more settled call."""
        with self._lock:
            self._left -= 1
            if self._left == 0 and not self.done.done():
                self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Reports to the waiter immediately that the batch has failed."""
        with self._lock:
            if not self.done.done():
                self.done.set_exception(error)
