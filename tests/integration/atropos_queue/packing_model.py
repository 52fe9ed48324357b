"""A second, naive implementation of the rule for Atropos' next batch: whole lists instead of a walk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    name: str
    size: int
    """Sequences."""
    env: str
    """Number of the group's environment, or "" without one."""


Shares = Sequence[tuple[str, float]]
"""min_batch_allocation by environment, in the environments' order."""


def next_batch(queue: Sequence[Ready], wanted: int, shares: Shares) -> list[Ready] | None:
    """Returns the groups of the next batch, or None if there is not yet a batch. No group is larger than the batch."""
    counts = Counter(group.size for group in queue)
    if wanted < 1 or _coins(list(counts.items()), wanted) is None:
        return None
    kept = _kept(queue, wanted, shares)
    if kept is None:
        return None
    chosen: list[Ready] = []
    for group in queue:
        others = sum(room for env, room in kept.items() if env != group.env)
        own = max(0, kept.get(group.env, 0) - group.size)
        if sum(one.size for one in chosen) + group.size + others + own <= wanted:
            chosen.append(group)
            if group.env in kept:
                kept[group.env] = own
    if sum(group.size for group in chosen) == wanted:
        return chosen
    found = _any(queue, wanted, _kept(queue, wanted, shares) or {}) or _any(queue, wanted, {})
    assert found is not None
    return found


def _any(queue: Sequence[Ready], wanted: int, kept: dict[str, int]) -> list[Ready] | None:
    """Chooses the oldest groups of each environment until they fill its room. Of the rest it chooses as many as
    possible of the size that comes first, and so on."""
    chosen: list[Ready] = []
    got: Counter[str] = Counter()
    for group in queue:
        if got[group.env] < kept.get(group.env, 0) and sum(one.size for one in chosen) + group.size <= wanted:
            got[group.env] += group.size
            chosen.append(group)
    rest = [group for group in queue if group not in chosen]
    counts = Counter(group.size for group in rest)
    of = _coins(list(counts.items()), wanted - sum(group.size for group in chosen))
    if of is None:
        return None
    for group in rest:
        if of.get(group.size, 0) > 0:
            of[group.size] -= 1
            chosen.append(group)
    return sorted(chosen, key=list(queue).index)


def _kept(queue: Sequence[Ready], wanted: int, shares: Shares) -> dict[str, int] | None:
    """Returns the sequences that only an environment's groups may fill. None: one more of its groups is awaited."""
    parts = {env: math.floor(wanted * share) for env, share in shares if math.floor(wanted * share) > 0}
    total = sum(parts.values())
    kept: dict[str, int] = {}
    for env, part in parts.items():
        part = math.floor(part * wanted / total) if total > wanted else part
        sizes = sorted((group.size for group in queue if group.env == env), reverse=True)
        if not sizes or sum(sizes) + sizes[-1] <= part:
            return None
        room = 0
        for size in sizes:
            room += size if room + size <= part else 0
        kept[env] = max(room, sizes[-1])
    return kept


def _coins(counts: Sequence[tuple[int, int]], target: int) -> dict[int, int] | None:
    """Returns how many of each size sum to the target, with as few as possible of the last size, then of the size
    before it."""
    if not counts:
        return {} if target == 0 else None
    *before, (size, count) = counts
    for used in range(min(count, target // size) + 1):
        found = _coins(before, target - used * size)
        if found is not None:
            return {**found, size: used}
    return None
