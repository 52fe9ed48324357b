"""Sources of a step's groups: leased on demand here, or one step ahead by prefetch.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from gristmill import TrajectoryGroup
from gristmill_trainer.data.samples import Prepared
from gristmill_trainer.leases import Leases

Prepare = Callable[[int, list[TrajectoryGroup]], Prepared]
"""Makes the samples of an optimizer step from its number and its groups."""


@dataclass
class Batch:
    """The groups and samples of an optimizer step."""

    step: int
    groups: list[TrajectoryGroup]
    prepare: Prepare

    @cached_property
    def prepared(self) -> Prepared:
        """Samples of the step, computed at the first access."""
        return self.prepare(self.step, self.groups)


class Feed(Protocol):
    """The batches of optimizer steps, in order."""

    def get(self, step: int, wait: float) -> Batch | None:
        """Returns the batch of `step`; None if its groups are not ready after `wait` seconds."""

    def close(self) -> None:
        """Gives back groups that were leased ahead."""


class Direct:
    """Leases a step's groups on demand."""

    def __init__(self, leases: Leases, amount: int, prepare: Prepare) -> None:
        """`amount`: groups per step, or sequences per step if the leases count sequences."""
        self._leases = leases
        self._amount = amount
        self._prepare = prepare

    def get(self, step: int, wait: float) -> Batch | None:
        """Long-polls the API for the batch of `step`."""
        groups = self._leases.take(step, self._amount, wait)
        return None if groups is None else Batch(step, groups, self._prepare)

    def close(self) -> None:
        """Does nothing, because no groups are leased ahead."""
