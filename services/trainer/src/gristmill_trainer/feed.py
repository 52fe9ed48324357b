"""Where the loop gets a step's groups from: leased when asked for, or one step ahead."""

from __future__ import annotations

from typing import Protocol

from gristmill import TrajectoryGroup
from gristmill_trainer.leases import Leases
from gristmill_trainer.prefetch import Prefetch


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


class Ahead:
    """Leases the next step's groups while one trains."""

    def __init__(self, leases: Leases, amount: int, first: int, last: int) -> None:
        """Steps `first` to `last`."""
        self._prefetch = Prefetch(leases, amount, first, last)

    def get(self, step: int, wait: float) -> list[TrajectoryGroup] | None:
        """Waits for the lease that is under way."""
        found = self._prefetch.get(wait)
        if found is None:
            return None
        assert found.step == step, f"prefetched step {found.step}, wanted {step}"
        return found.groups

    def close(self) -> None:
        """End the thread and give back what nobody took."""
        self._prefetch.close()
