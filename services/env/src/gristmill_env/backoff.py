"""The pauses between repetitions."""

from __future__ import annotations

import random
from dataclasses import dataclass


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
        return pause * random.uniform(0.5, 1.5)

    def reset(self) -> None:
        """Resets the pauses to the shortest pause."""
        self.made = 0
