"""A second, naive implementation of the rule for Atropos' next batch: whole lists instead of a walk."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
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
    if sum(group.size for group in queue) < wanted or wanted < 1:
        return None
    largest = max(group.size for group in queue)
    chosen = _with_shares(queue, largest, wanted, shares) if shares else _without_shares(queue, largest, wanted)
    if chosen is not None:
        return chosen
    stuck = any(largest % group.size or (shares and not group.env) for group in queue)
    whole = _packed(queue, largest, by_env=bool(shares))
    # Packs that sum to enough, and still make no batch, never will.
    stuck = stuck or (sum(group.size for group in whole) >= wanted and _minima(whole, wanted, shares) is not None)
    return _any(queue, wanted, shares) if stuck else None


def _packed(queue: Sequence[Ready], largest: int, *, by_env: bool) -> list[Ready]:
    """Returns the groups of complete packs, in the order in which the packs complete."""
    open_packs: defaultdict[tuple[int, str], list[Ready]] = defaultdict(list)
    found: list[Ready] = []
    for group in queue:
        if by_env and not group.env:
            continue
        pack = open_packs[group.size, group.env if by_env else ""]
        pack.append(group)
        if len(pack) * group.size == largest:
            found += pack
            pack.clear()
    return found


def _without_shares(queue: Sequence[Ready], largest: int, wanted: int) -> list[Ready] | None:
    chosen: list[Ready] = []
    for group in _packed(queue, largest, by_env=False):
        chosen.append(group)
        taken = sum(one.size for one in chosen)
        if taken >= wanted:
            return chosen if taken == wanted else None
    return None


def _minima(packed: Sequence[Ready], wanted: int, shares: Shares) -> list[tuple[str, int]] | None:
    """Returns what each environment must have of the batch. None: an environment that must have a part has no
    groups."""
    smallest: dict[str, int] = {}
    for group in packed:
        smallest[group.env] = min(smallest.get(group.env, group.size), group.size)
    due = [(env, int(wanted * share)) for env, share in shares if int(wanted * share) > 0]
    if any(env not in smallest for env, _ in due):
        return None
    total = sum(amount for _, amount in due)
    if total > wanted:
        due = [(env, max(smallest[env], math.floor(amount * (wanted / total)))) for env, amount in due]
    return due


def _with_shares(queue: Sequence[Ready], largest: int, wanted: int, shares: Shares) -> list[Ready] | None:
    packed = _packed(queue, largest, by_env=True)
    minima = _minima(packed, wanted, shares)
    if minima is None:
        return None
    chosen: list[Ready] = []

    def take(group: Ready) -> bool:
        fits = sum(one.size for one in chosen) + group.size <= wanted
        if fits:
            chosen.append(group)
        return fits

    for env, amount in minima:
        got = 0
        for group in packed:
            if group.env == env and got < amount and take(group):
                got += group.size
    for group in queue:
        if group in packed and group not in chosen:
            take(group)
    return chosen if sum(group.size for group in chosen) == wanted else None


def _any(queue: Sequence[Ready], wanted: int, shares: Shares) -> list[Ready] | None:
    """Chooses the shares first, in the queue's order. Of the rest it chooses as many as possible of the size that comes
    first, and so on."""
    minima = _minima(queue, wanted, shares)
    if minima is None:
        return None
    due = dict(minima)
    chosen: list[Ready] = []
    for group in queue:
        if due.get(group.env, 0) > 0 and sum(one.size for one in chosen) + group.size <= wanted:
            due[group.env] -= group.size
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
    return chosen


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
