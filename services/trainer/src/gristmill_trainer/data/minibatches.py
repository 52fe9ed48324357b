"""Several optimizer updates on one step's batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def split(group_ids: Sequence[str], parts: int, *, seed: int, step: int, epoch: int) -> list[tuple[int, ...]]:
    """Indices of samples, by update. `group_ids`: each sample's group.

    A group stays whole. Groups are shuffled, another way in each epoch of each step and the same way again after a
    resume, and go one by one to the part that has the fewest samples: parts differ by no more than the largest group.
    There are fewer parts than asked for when there are fewer groups.
    """
    groups: dict[str, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        groups.setdefault(group_id, []).append(index)
    ids = list(groups)
    order = np.random.default_rng([seed % (1 << 64), step, epoch]).permutation(len(ids))
    found: list[list[int]] = [[] for _ in range(min(parts, len(ids)))]
    for place in order.tolist():
        min(found, key=len).extend(groups[ids[place]])
    return [tuple(sorted(part)) for part in found]
