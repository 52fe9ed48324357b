"""Where the loop gets a step's groups from: leased when asked for here, one step ahead by prefetch.py."""

from __future__ import annotations

from typing import Protocol

from gristmill import TrajectoryGroup
from gristmill_trainer.leases import Leases


class Feed(Protocol):
    """The batches of optimizer steps, in order."""

    def get(self, step: int, wait: float) -> list[TrajectoryGroup] | None:
        """The groups of `step`; None when they are not there after `wait` seconds."""

    def close(self) -> None:
        """Give back what was leased ahead."""


class Direct:
    """Leases when asked."""

    def __init__(self, leases: Leases, amount: int) -> None:
        """`amount`: groups a step, or sequences where the leases count those."""
        self._leases = leases
        self._amount = amount

    def get(self, step: int, wait: float) -> list[TrajectoryGroup] | None:
        """Long-polls the API."""
        return self._leases.take(step, self._amount, wait)

    def close(self) -> None:
        """Nothing was leased ahead."""
