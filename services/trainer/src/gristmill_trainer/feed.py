"""Where the loop gets a step's groups from: leased when asked for here, one step ahead by prefetch.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from gristmill import TrajectoryGroup
from gristmill_trainer.data.samples import Prepared
from gristmill_trainer.leases import Leases

Prepare = Callable[[int, list[TrajectoryGroup]], Prepared]
"""Makes the samples of an optimizer step, by its number, out of its groups."""


@dataclass
class Batch:
    """What an optimizer step is made of."""

    step: int
    groups: list[TrajectoryGroup]
    prepare: Prepare

    @cached_property
    def prepared(self) -> Prepared:
        """Made when it is first asked for."""
        return self.prepare(self.step, self.groups)


class Feed(Protocol):
    """The batches of optimizer steps, in order."""

    def get(self, step: int, wait: float) -> Batch | None:
        """That of `step`; None when its groups are not there after `wait` seconds."""

    def close(self) -> None:
        """Give back what was leased ahead."""


class Direct:
    """Leases when asked."""

    def __init__(self, leases: Leases, amount: int, prepare: Prepare) -> None:
        """`amount`: groups a step, or sequences where the leases count those."""
        self._leases = leases
        self._amount = amount
        self._prepare = prepare

    def get(self, step: int, wait: float) -> Batch | None:
        """Long-polls the API."""
        groups = self._leases.take(step, self._amount, wait)
        return None if groups is None else Batch(step, groups, self._prepare)

    def close(self) -> None:
        """Nothing was leased ahead."""
