"""Statistics over a set of saved groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gristmill.internal.saved import SavedGroup

SAME = 1e-9
"""Totals whose difference is less than this are the same, because sums of equal parts may differ in the last bits."""


@dataclass
class Values:
    """Running statistics of one reward's values, or of the totals."""

    count: int = 0
    """Completions with a value."""
    low: float = math.inf
    high: float = -math.inf
    skipped: int = 0
    """Completions for which the reward returned no value."""
    errors: int = 0
    """Completions on which the reward failed."""
    means: list[float] = field(default_factory=list)
    """The mean of each group's values, of the groups that have any."""

    def add(self, values: Sequence[float | None], errors: int) -> None:
        """Adds one group; None counts as skipped, except for `errors` of them."""
        numbers = [value for value in values if value is not None]
        self.count += len(numbers)
        self.skipped += len(values) - len(numbers) - errors
        self.errors += errors
        if numbers:
            self.low, self.high = min(self.low, *numbers), max(self.high, *numbers)
            self.means.append(math.fsum(numbers) / len(numbers))

    @property
    def unscored(self) -> int:
        """Completions without a value."""
        return self.skipped + self.errors

    @property
    def mean(self) -> float | None:
        """The mean of the groups' means; None without a value."""
        return math.fsum(self.means) / len(self.means) if self.means else None


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram: values in [low, high); the last bar includes high."""

    low: float
    high: float
    count: int


@dataclass
class GroupStats:
    """Counts and means over groups."""

    groups: int = 0
    completions: int = 0
    truncated: int = 0
    """Completions that were truncated for lack of room."""
    failed: int = 0
    """Completions on which a reward failed."""
    same: int = 0
    """Groups of two or more completions whose totals are all the same, so that they give no gradient."""
    rewards: Values = field(default_factory=Values)
    """Totals."""
    parts: dict[str, Values] = field(default_factory=dict)
    """Values by reward."""
    totals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Tokens of each completion, if known."""

    @classmethod
    def of(cls, groups: Iterable[SavedGroup]) -> GroupStats:
        """Returns the statistics of these groups."""
        stats = cls()
        for group in groups:
            stats.add(group)
        return stats

    def add(self, group: SavedGroup) -> None:
        """Adds one group."""
        self.groups += 1
        self.completions += len(group.completions)
        self.same += all_same(group.totals)
        self.totals += group.totals
        self.truncated += sum(completion.truncated for completion in group.completions)
        self.failed += sum(completion.error is not None for completion in group.completions)
        self.tokens += [completion.tokens for completion in group.completions if completion.tokens is not None]
        failed = sum(completion.error is not None and completion.total is None for completion in group.completions)
        self.rewards.add([completion.total for completion in group.completions], failed)
        for name in dict.fromkeys(name for completion in group.completions for name in completion.scores):
            scored = [completion for completion in group.completions if name in completion.scores]
            errors = sum(name in completion.errors for completion in scored)
            self.parts.setdefault(name, Values()).add([completion.scores[name] for completion in scored], errors)


def all_same(totals: Sequence[float]) -> bool:
    """Returns whether there are two or more totals and all are the same."""
    return len(totals) > 1 and max(totals) - min(totals) < SAME


def histogram(values: Sequence[float], bars: int = 20) -> list[Bar]:
    """Returns bars of equal width over `values`; one bar when all values are the same, and no bar for no values."""
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
    """Returns the value that `share` of `values` do not exceed. `values`: at least one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def figure(value: float | None) -> str:
    """Returns three significant digits; "none" for None."""
    return "none" if value is None else f"{value:.3g}"
