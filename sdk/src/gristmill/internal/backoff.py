"""The pauses between repetitions of a call: one rule for all of Gristmill."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# A separate generator, because a trainer saves the process' generator in checkpoints, and retries must not advance it.
_JITTER: Final = random.Random()
_LONGEST_ASKED: Final = 120.0
"""Seconds. A server that asks for a longer pause is asked again after this time."""


@dataclass
class Backoff:
    """Exponential backoff in seconds, from `first` to `longest`, doubled each time. Jitter: 0.5 to 1.5 times."""

    first: float
    longest: float
    made: int = 0

    def next(self) -> float:
        """Returns the next pause in seconds."""
        pause: float = min(self.first * 2**self.made, self.longest)
        self.made = min(self.made + 1, 32)
        return pause * _JITTER.uniform(0.5, 1.5)

    def reset(self) -> None:
        """Resets the pauses to the shortest pause."""
        self.made = 0


def asked_pause(headers: Mapping[str, str]) -> float:
    """Returns the seconds in the Retry-After header of an answer, at most 120; 0 if it names none or a date."""
    try:
        seconds = float(headers.get("Retry-After") or 0)
    except ValueError:  # dates are rare, and the client's own backoff is enough
        return 0.0
    return min(seconds, _LONGEST_ASKED) if seconds > 0 else 0.0  # also for NaN
