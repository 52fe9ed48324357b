"""Advantages: how much better a rollout is than its group; the length penalty, and the environment's overrides.

An overlong completion is truncated at max_tokens, with finish_reason "length". The filter leaves it without a trained
token, as TRL's `mask_truncated_completions` does. The completion stays in its group's baseline and counts as a sequence
if an objective divides by sequences. The length penalty is added to rewards before advantages.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gristmill import TrajectoryGroup
from gristmill_trainer.data.types import F32, Bool
from gristmill_trainer.errors import TrainerError

Scale = Literal["group", "batch", "none"]
F64 = npt.NDArray[np.float64]

_LOG = logging.getLogger(__name__)
_EPSILON = 1e-4
_TRUNCATED = "length"
_ZERO = "set_advantage_to_zero"
_NOT_OURS = "group_size"


def advantages(rewards: Sequence[F64], scale: Scale) -> list[F32]:
    """Returns A = (r - mean_g) / (std + 1e-4) for each group of the step. Standard deviations have ddof = 1.

    `rewards`: f64[R] per group, of its R rollouts; the result is f32[R] per group. `scale` selects std:
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


def rollout_rewards(group: TrajectoryGroup) -> F64:
    """Returns f64[R]: the environment's reward of each rollout."""
    return group.rollout_rewards.astype(np.float64)


def truncated(group: TrajectoryGroup) -> Bool:
    """Returns bool[R]: rollouts of which a branch was truncated at max_tokens."""
    of_sequences = np.array([reason == _TRUNCATED for reason in group.finish_reasons], np.bool_)
    return np.logical_or.reduceat(of_sequences, group.rollout_starts)


def completion_tokens(group: TrajectoryGroup) -> npt.NDArray[np.int64]:
    """Returns i64[R]: sampled tokens of all replies of a rollout."""
    starts = np.cumsum(group.lengths, dtype=np.int64) - group.lengths
    return np.add.reduceat(group.mask, starts[group.rollout_starts], dtype=np.int64)


def longest_reply(group: TrajectoryGroup) -> npt.NDArray[np.int64]:
    """Returns i64[R]: the largest number of consecutive sampled tokens in any branch of a rollout."""
    runs = [_longest_run(mask) for mask in np.split(group.mask, np.cumsum(group.lengths)[:-1])]
    return np.maximum.reduceat(np.array(runs, np.int64), group.rollout_starts)


def length_penalty(lengths: npt.NDArray[np.int64], max_tokens: int, buffer: int, penalty: float) -> F64:
    """Returns f64[G], never positive: the penalty to add to the rewards of completions of `lengths` tokens.

    For a completion y (Yu et al. 2025, "DAPO", eq. 13), with L_max = max_tokens and L_cache = buffer:

        0                                                  |y| <= L_max - L_cache
        -penalty * (|y| - (L_max - L_cache)) / L_cache     up to L_max
        -penalty                                           beyond

    In a rollout with several turns, each reply has the limit max_tokens, and |y| is the longest reply. With a buffer
    longer than the limit, the formula gives a penalty from the first token.
    """
    into = np.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0)
    return -penalty * into


def _longest_run(mask: Bool) -> int:
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return int((edges[1::2] - edges[::2]).max(initial=0))


class OverridesError(TrainerError):
    """Overrides that cannot be applied."""


@dataclass(frozen=True, eq=False)
class Overrides:
    zeroed: Bool
    """bool[G]: sequences whose advantage is set to zero."""
    unknown: Counter[str]


def read_overrides(group: TrajectoryGroup) -> Overrides:
    """Parses a group's overrides (Atropos' protocol). Unknown keys are counted, and logged the first time.

    `TrajectoryGroup.overrides` is {"sequences": [{...}, ...], "group": {...}}; both keys are optional. Known overrides:

        set_advantage_to_zero   bool; for a sequence or the group. The tokens stay in the batch and its counts. Only
                                penalties give them a gradient. The reward stays in the group's baseline.
        group_size              for the group: the environment uses it in its own check. The trainer ignores it.

    Raises OverridesError for a wrong type, and for a list of overrides that does not match the sequences.
    """
    zeroed = np.zeros(group.size, np.bool_)
    unknown: Counter[str] = Counter()
    if group.overrides is None:
        return Overrides(zeroed, unknown)
    overrides = _mapping(group.overrides, "overrides")
    unknown.update(overrides.keys() - {"sequences", "group"})
    zeroed |= _asks_for_zero(overrides.get("group"), "the group's overrides", unknown)
    sequences = overrides.get("sequences")
    if sequences is None:
        sequences = []
    if not isinstance(sequences, list):
        raise OverridesError(
            "wrong_type",
            f"the sequences' overrides are a {type(sequences).__name__}, not a list",
            field="the sequences' overrides",
        )
    asked = [_asks_for_zero(one, f"the overrides of sequence {index}", unknown) for index, one in enumerate(sequences)]
    zeroed |= _of_each(asked, group.size)
    for key in unknown:
        _tell(key)
    return Overrides(zeroed, unknown)


def _of_each(asked: Sequence[bool], size: int) -> Bool:
    if len(asked) == size:
        return np.array(asked, np.bool_)
    # Atropos accepts shorter lists: its environments omit sequences without overrides.
    if any(asked):
        raise OverridesError(
            "length_mismatch",
            f"{len(asked)} overrides for {size} sequences: the trainer cannot assign them to sequences",
            field="overrides",
        )
    return np.zeros(size, np.bool_)


def _asks_for_zero(overrides: Any, whose: str, unknown: Counter[str]) -> bool:
    if overrides is None:
        return False
    mapping = _mapping(overrides, whose)
    unknown.update(mapping.keys() - {_ZERO, _NOT_OURS})
    value = mapping.get(_ZERO)
    if value not in (None, False, True):
        raise OverridesError("wrong_type", f"{whose}: {_ZERO} is {value!r}, not true or false", field=whose)
    return bool(value)


def _mapping(value: Any, whose: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise OverridesError("wrong_type", f"{whose}: a {type(value).__name__}, not a mapping of names", field=whose)
    return value


@functools.lru_cache(maxsize=256)
def _tell(key: str) -> None:
    _LOG.warning("environments send the override %r, which is not known here and does nothing", key)
