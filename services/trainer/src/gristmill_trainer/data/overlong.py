"""Overlong completions: filter and length penalty.

Filter: a completion with finish_reason "length" has no trained token, as in TRL's `mask_truncated_completions`. The
completion stays in its group's baseline and counts as a sequence if an objective divides by sequences.

Length penalty, added to rewards before advantages (Yu et al. 2025, "DAPO", eq. 13), for a completion y:

    0                                            |y| <= L_max - L_cache
    -p * (|y| - (L_max - L_cache)) / L_cache     up to L_max
    -p                                           beyond

L_max is the max_tokens of sampling, L_cache is overlong_buffer, p is overlong_penalty. In a rollout with several turns,
each reply has this limit, and |y| is the longest reply.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gristmill import TrajectoryGroup
from gristmill_trainer.data.sample import Bool

_CUT_OFF = "length"


def cut_off(group: TrajectoryGroup) -> Bool:
    """Returns bool[G]: completions that were truncated at max_tokens."""
    return np.array([reason == _CUT_OFF for reason in group.finish_reasons], np.bool_)


def completion_tokens(group: TrajectoryGroup) -> npt.NDArray[np.int64]:
    """Returns i64[G]: sampled tokens of all replies."""
    starts = np.cumsum(group.lengths, dtype=np.int64) - group.lengths
    return np.add.reduceat(group.mask, starts, dtype=np.int64)


def longest_reply(group: TrajectoryGroup) -> npt.NDArray[np.int64]:
    """Returns i64[G]: the largest number of consecutive sampled tokens."""
    return np.array([_longest_run(mask) for mask in np.split(group.mask, np.cumsum(group.lengths)[:-1])], np.int64)


def punishment(lengths: npt.NDArray[np.int64], max_tokens: int, buffer: int, penalty: float) -> npt.NDArray[np.float64]:
    """Returns f64[G], never positive: the penalty to add to the rewards of completions of `lengths` tokens.

    With a buffer longer than the limit, the formula gives a penalty from the first token.
    """
    into = np.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0)
    return -penalty * into


def _longest_run(mask: Bool) -> int:
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return int((edges[1::2] - edges[::2]).max(initial=0))
