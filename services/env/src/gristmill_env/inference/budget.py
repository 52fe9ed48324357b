"""Limits the rate of retries, so that retries do not overload a failing server."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHARE = 0.2
_FLOOR = 10.0
_RESERVE = 100.0


class RetryBudget:
    """A token bucket of retries, as in Finagle and gRPC.

    Each request adds 0.2 retries, each second adds 10. The bucket holds at most 100. If the bucket is empty, Finagle
    and gRPC fail the request. Here the request waits, because a rollout is worth more than the waiting time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns the time in seconds."""
        self._clock = clock
        self._saved = _RESERVE
        self._counted_at = clock()

    def request(self) -> None:
        """Counts a request that is sent for the first time."""
        self._saved = min(_RESERVE, self._saved + _SHARE)

    def retry(self) -> float:
        """Takes one retry from the bucket. Returns the seconds to wait before the retry; 0 if the bucket is not
        empty."""
        now = self._clock()
        self._saved = min(_RESERVE, self._saved + (now - self._counted_at) * _FLOOR)
        self._counted_at = now
        self._saved -= 1
        return max(0.0, -self._saved / _FLOOR)
