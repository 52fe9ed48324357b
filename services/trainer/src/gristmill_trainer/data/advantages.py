"""Advantages: how much better a completion is than its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from gristmill_trainer.data.sample import F32

Scale = Literal["group", "batch", "none"]
F64 = npt.NDArray[np.float64]

_EPSILON = 1e-4


def advantages(rewards: Sequence[F64], scale: Scale) -> list[F32]:
    """Returns A = (r - mean_g) / (std + 1e-4) for each group of the step. Standard deviations have ddof = 1.

    `rewards`: f64[G] per group; the result is f32[G] per group. `scale` selects std:
        group   std of the group (GRPO; Shao et al. 2024, as in TRL)
        batch   std of all rewards of the step
        none    no division (Dr. GRPO; Liu et al. 2025)
    In a group of one, the advantage is the reward. In a group of equal rewards, advantages are zero.
    """
    everything = np.concatenate(rewards) if rewards else np.empty(0)
    of_batch = _std(everything) if scale == "batch" else 0.0
    return [_of_group(group, scale, of_batch).astype(np.float32) for group in rewards]


def _of_group(rewards: F64, scale: Scale, of_batch: float) -> F64:
    if len(rewards) == 1:
        return rewards
    # By rounding, the mean of equal numbers can differ from them.
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    distance: F64 = rewards - rewards.mean()
    if scale == "none":
        return distance
    return distance / np.float64((of_batch if scale == "batch" else _std(rewards)) + _EPSILON)


def _std(rewards: F64) -> float:
    return float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0
