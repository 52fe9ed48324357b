"""How often failed requests may be sent again, so that a server in trouble is not buried under its own failures."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHARE = 0.2
_FLOOR = 10.0
_RESERVE = 100.0


class RetryBudget:
    """A bucket of retries, as in Finagle and gRPC.

    Every request puts a fifth of a retry in, every second ten; at most a hundred are saved up. Where those systems
    fail a request that finds the bucket empty, here it waits for its turn: a rollout is worth more than its time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._saved = _RESERVE
        self._counted_at = clock()

    def request(self) -> None:
        """A request is made for the first time."""
        self._saved = min(_RESERVE, self._saved + _SHARE)

    def retry(self) -> float:
        """Take one retry. Returns the seconds after which it may be made: 0 while there are some saved."""
        now = self._clock()
        self._saved = min(_RESERVE, self._saved + (now - self._counted_at) * _FLOOR)
        self._counted_at = now
        self._saved -= 1
        return max(0.0, -self._saved / _FLOOR)
