"""Completions that came to the end of what they may have.

Filter: a completion with finish_reason "length" has no trained token, as TRL's `mask_truncated_completions`. It stays
in its group's baseline and counts as a sequence where an objective divides by sequences.

Punishment: the reward falls as the completion nears its limit (Yu et al. 2025, "DAPO", eq. 13), before advantages:

    0                                            |y| <= L_max - L_cache
    -p * (|y| - (L_max - L_cache)) / L_cache     up to L_max
    -p                                           beyond

L_max is the max_tokens that the completions were sampled with, L_cache is overlong_buffer, p is overlong_penalty. Of an
attempt in several turns each reply had that limit, and |y| is the longest reply.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gristmill import TrajectoryGroup
from gristmill_trainer.data.sample import Bool

_CUT_OFF = "length"


def cut_off(group: TrajectoryGroup) -> Bool:
    """bool[G]: completions that were cut off at max_tokens."""
    return np.array([reason == _CUT_OFF for reason in group.finish_reasons], np.bool_)


def completion_tokens(group: TrajectoryGroup) -> npt.NDArray[np.int64]:
    """i64[G]: sampled tokens, of all replies."""
    starts = np.cumsum(group.lengths, dtype=np.int64) - group.lengths
    return np.add.reduceat(group.mask, starts, dtype=np.int64)


def longest_reply(group: TrajectoryGroup) -> npt.NDArray[np.int64]:
    """i64[G]: most sampled tokens in a row."""
    return np.array([_longest_run(mask) for mask in np.split(group.mask, np.cumsum(group.lengths)[:-1])], np.int64)


def punishment(lengths: npt.NDArray[np.int64], max_tokens: int, buffer: int, penalty: float) -> npt.NDArray[np.float64]:
    """f64[G], none positive: what is added to the rewards of completions of `lengths` tokens.

    A buffer that is longer than the limit begins before the first token, as the formula says.
    """
    into = np.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0)
    return -penalty * into


def _longest_run(mask: Bool) -> int:
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return int((edges[1::2] - edges[::2]).max(initial=0))
