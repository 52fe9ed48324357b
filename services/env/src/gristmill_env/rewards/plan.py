"""The rewards of a run as a tree. Leaves are called; branches are computed from the outcomes of their parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gristmill_env.rewards.calls import Outcome, Parted, RewardCall, Said, Task
from gristmill_env.rewards.sample import Failure, Sample


class Combination(Protocol):
    """The function with which a composed reward combines the values of its parts."""

    def combine(self, parts: Mapping[str, Sequence[float | None]]) -> Sequence[float | None]:
        """Computes one value per completion (None: no value). `parts`: lists of values over completions, by name."""


@dataclass(frozen=True)
class Branch:
    """A composed reward of a run."""

    name: str
    parts: Mapping[str, Node]
    """The parts by their names inside the composed reward."""
    metrics: frozenset[str]
    """Parts with weight 0. If such a part fails, the composed reward still has a value."""
    combination: Combination

    def outcomes(self, found: Mapping[str, Sequence[Outcome]]) -> list[Outcome]:
        """Computes the outcomes from the parts' outcomes, by full name. A part's failure on a completion becomes the
        composed reward's outcome."""
        columns = {short: found[node.name] for short, node in self.parts.items()}
        size = len(next(iter(columns.values())))
        failures = [self._failure(columns, at) for at in range(size)]
        good = [at for at in range(size) if failures[at] is None]
        values: dict[str, list[float | None]] = {}
        for short, column in columns.items():
            values[short] = [None if isinstance(item := column[at], Failure) else item for at in good]
        outcomes: list[Outcome] = list(failures)
        for at, value in zip(good, self.combination.combine(values) if good else [], strict=True):
            overflows = value is not None and not math.isfinite(value)
            outcomes[at] = Failure(self.name, "its sum overflows", "sum_overflows") if overflows else value
        return outcomes

    def _failure(self, columns: Mapping[str, Sequence[Outcome]], at: int) -> Failure | None:
        for short, column in columns.items():
            if short not in self.metrics and isinstance(failure := column[at], Failure):
                return failure
        return None


Node = Task | Branch


def tasks(nodes: Iterable[Node]) -> Iterator[Task]:
    """Yields the leaves, in the order of the configuration."""
    for node in nodes:
        yield from _leaves(node)


def calls(nodes: Iterable[Node], samples: Sequence[Sample]) -> dict[str, list[RewardCall]]:
    """Returns the calls that score a group, by the full names of leaves, in the order of the configuration."""
    return {task.name: task.calls(samples) for task in tasks(nodes)}


def outcomes(nodes: Iterable[Node], made: Mapping[str, Sequence[RewardCall]]) -> dict[str, Sequence[Outcome]]:
    """Returns the outcomes of all rewards, by full name, one item per completion. A composed reward precedes its
    parts."""
    found: dict[str, Sequence[Outcome]] = {}
    for node in nodes:
        found |= _outcomes(node, made)
    return found


def weighted_sum(values: Iterable[tuple[float, float | None]]) -> float | None:
    """Returns Σ weight × value over (weight, value) pairs with a nonzero weight and a value. None without such a pair.

    The sum is rounded once, so that the order of rewards does not matter. An overflow gives infinity.
    """
    products = [weight * value for weight, value in values if weight != 0 and value is not None]
    try:
        return math.fsum(products) if products else None
    except (OverflowError, ValueError):  # ValueError: the products contain both infinities
        return math.inf


def _leaves(node: Node) -> Iterator[Task]:
    if isinstance(node, Task):
        yield node
        return
    for part in node.parts.values():
        yield from _leaves(part)


def _outcomes(node: Node, made: Mapping[str, Sequence[RewardCall]]) -> dict[str, Sequence[Outcome]]:
    if isinstance(node, Task):
        return _said(node.name, [outcome for call in made[node.name] for outcome in call.result])
    inner: dict[str, Sequence[Outcome]] = {}
    for part in node.parts.values():
        inner |= _outcomes(part, made)
    return {node.name: node.outcomes(inner), **inner}


def _said(name: str, column: Sequence[Said]) -> dict[str, Sequence[Outcome]]:
    """Returns the values of a leaf and the values of its parts. A completion without a part has None for the part."""
    parts = dict.fromkeys(part for item in column if isinstance(item, Parted) for part in item.parts)
    found: dict[str, Sequence[Outcome]] = {name: [item.whole if isinstance(item, Parted) else item for item in column]}
    for part in parts:
        found[f"{name}/{part}"] = [item.parts.get(part) if isinstance(item, Parted) else None for item in column]
    return found
