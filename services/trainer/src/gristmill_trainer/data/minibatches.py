"""Split of one step's batch into several optimizer updates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def split(group_ids: Sequence[str], parts: int, *, seed: int, step: int, epoch: int) -> list[tuple[int, ...]]:
    """Returns the sample indices of each update. `group_ids`: each sample's group.

    A group stays whole. The order of groups is random per epoch and step, and the same after a resume. Each group goes
    to the part with the fewest samples, so parts differ by at most the largest group. With fewer groups than `parts`,
    there are as many parts as groups.
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
