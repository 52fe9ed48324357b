"""Advantages: how much better a completion is than its group."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def group_advantages(rewards: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A = (r - mean) / (std + 1e-4) over the group, std with ddof = 1 (GRPO as in TRL).

    `rewards` and the result are f32[G]. A group of one has nothing to compare with: its advantage is its reward.
    """
    if len(rewards) == 1:
        return rewards.astype(np.float32)
    wide = rewards.astype(np.float64)
    advantages: npt.NDArray[np.float32] = ((wide - wide.mean()) / (wide.std(ddof=1) + 1e-4)).astype(np.float32)
    return advantages
