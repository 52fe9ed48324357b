"""Statistics of a step's groups before the model runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gristmill import TrajectoryGroup
from gristmill_trainer.data.overlong import completion_tokens, cut_off
from gristmill_trainer.data.rejected import Reason, Rejected

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Statistics:
    """Statistics of the accepted groups, including their dropped sequences. Means are NaN without accepted groups."""

    groups: int
    sequences: int
    reward_mean: float
    """Mean of the environment's rewards, without the length penalty."""
    reward_std: float
    """Standard deviation over all sequences, ddof = 0."""
    reward_parts: dict[str, float]
    """Mean of each reward part, over the sequences with a value for that part."""
    staleness: list[int]
    """Steps, one entry per group, in the order of group ids."""
    completion_tokens_mean: float
    """Sampled tokens per sequence, before the cut at seq_len."""
    cut_off_share: float
    """Fraction of sequences whose completion reached max_tokens."""
    zero_advantage_share: float
    """Fraction of groups with only zero advantages. Only penalties give these groups a gradient."""
    seq_len_cuts: int
    """Sequences that were cut at seq_len."""
    overlong_filtered: int
    """Sequences without trained tokens because they were truncated at max_tokens."""
    overlong_punished: int
    """Sequences with a length penalty."""
    zeroed: int
    """Sequences whose advantage an override set to zero."""
    rejected: dict[Reason, int]
    """Dropped groups and sequences per reason; a whole group counts once."""
    unknown_overrides: dict[str, int]
    """Count of unknown overrides per key."""


@dataclass
class Tally:
    """Counts collected while samples are made."""

    zero_groups: int = 0
    cuts: int = 0
    filtered: int = 0
    punished: int = 0
    zeroed: int = 0
    staleness: list[int] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)


def statistics(groups: Sequence[TrajectoryGroup], rejected: Iterable[Rejected], tally: Tally) -> Statistics:
    """Computes the statistics. `groups`: the accepted groups."""
    rewards = np.concatenate([np.empty(0), *(group.rewards.astype(np.float64) for group in groups)])
    cuts = np.concatenate([np.empty(0), *(cut_off(group) for group in groups)])
    lengths = np.concatenate([np.empty(0), *(completion_tokens(group) for group in groups)])
    return Statistics(
        groups=len(groups),
        sequences=len(rewards),
        reward_mean=_mean(rewards),
        reward_std=float(rewards.std()) if len(rewards) else float("nan"),
        reward_parts=_parts(groups),
        staleness=tally.staleness,
        completion_tokens_mean=_mean(lengths),
        cut_off_share=_mean(cuts),
        zero_advantage_share=tally.zero_groups / len(groups) if groups else float("nan"),
        seq_len_cuts=tally.cuts,
        overlong_filtered=tally.filtered,
        overlong_punished=tally.punished,
        zeroed=tally.zeroed,
        rejected=dict(sorted(Counter(one.reason for one in rejected).items())),
        unknown_overrides=dict(sorted(tally.unknown.items())),
    )


def log_rejected(rejected: Sequence[Rejected]) -> None:
    """Logs one line per reason, with the first case."""
    for reason in dict.fromkeys(one.reason for one in rejected):
        cases = [one for one in rejected if one.reason is reason]
        first = cases[0]
        whose = first.group_id if first.sequence is None else f"{first.group_id}, sequence {first.sequence}"
        _LOG.warning("not trained on, %s: %d, such as %s: %s", reason, len(cases), whose, first.detail)


def _mean(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _parts(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    names = dict.fromkeys(name for group in groups for name in group.reward_parts)
    found = {
        name: [value for group in groups for value in group.reward_parts.get(name, ()) if value is not None]
        for name in names
    }
    return {name: sum(values) / len(values) for name, values in found.items() if values}
