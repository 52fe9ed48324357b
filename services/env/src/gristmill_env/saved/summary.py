"""What a set of saved groups is like as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gristmill_env.saved.group import SavedGroup

SAME = 1e-9
"""Totals nearer than this are the same: sums of the same parts may differ in their last bits."""


@dataclass
class Values:
    """Values of one reward, or totals, counted as they come."""

    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    silent: int = 0
    """Completions it said nothing of."""

    def add(self, value: float | None) -> None:
        """One more; None counts as silent."""
        if value is None:
            self.silent += 1
            return
        self.count += 1
        self.total += value
        self.low = min(self.low, value)
        self.high = max(self.high, value)

    @property
    def mean(self) -> float | None:
        """None when there is no value."""
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram: values in [low, high), the last one's high included."""

    low: float
    high: float
    count: int


@dataclass
class Summary:
    """Counts and means over groups."""

    groups: int = 0
    completions: int = 0
    cut: int = 0
    """Completions that ended because there was no more room."""
    failed: int = 0
    """Completions on which a reward failed."""
    same: int = 0
    """Groups of two or more completions whose totals are all the same: nothing could be learned from them."""
    rewards: Values = field(default_factory=Values)
    """Totals."""
    parts: dict[str, Values] = field(default_factory=dict)
    """By reward."""
    totals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Tokens of each completion, where they are known."""

    @classmethod
    def of(cls, groups: Iterable[SavedGroup]) -> Summary:
        """Of these groups."""
        summary = cls()
        for group in groups:
            summary.add(group)
        return summary

    def add(self, group: SavedGroup) -> None:
        """Count one more group."""
        self.groups += 1
        self.completions += len(group.completions)
        self.same += all_same(group.totals)
        self.totals += group.totals
        for completion in group.completions:
            self.cut += completion.cut
            self.failed += completion.error is not None
            self.rewards.add(completion.total)
            if completion.tokens is not None:
                self.tokens.append(completion.tokens)
            for name, value in completion.scores.items():
                self.parts.setdefault(name, Values()).add(value)


def all_same(totals: Sequence[float]) -> bool:
    """Whether two or more totals do not tell their completions apart."""
    return len(totals) > 1 and max(totals) - min(totals) < SAME


def histogram(values: Sequence[float], bars: int = 20) -> list[Bar]:
    """`values` in bars of one width; one bar when all are the same, none when there are none."""
    if not values:
        return []
    low, high = min(values), max(values)
    if high - low < SAME:
        return [Bar(low, high, len(values))]
    width = (high - low) / bars
    counts = [0] * bars
    for value in values:
        counts[min(int((value - low) / width), bars - 1)] += 1
    return [Bar(low + at * width, low + (at + 1) * width, count) for at, count in enumerate(counts)]


def quantile(values: Sequence[int], share: float) -> int:
    """The value that `share` of `values` do not exceed. `values`: at least one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
