"""Groups -> samples: the sequences of a step that are trained on, with their advantages, and statistics of the step."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gristmill import Hyperparameters, TrajectoryGroup
from gristmill_trainer.data.advantages import (
    F64,
    Overrides,
    OverridesError,
    advantages,
    completion_tokens,
    length_penalty,
    longest_reply,
    read_overrides,
    rollout_rewards,
    truncated,
)
from gristmill_trainer.data.checks import Limits, check_group, check_sample, staleness
from gristmill_trainer.data.types import F32, Reason, Rejected, Sample, Teacher, rollouts_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A step's data. `samples` is empty if everything was rejected."""

    samples: list[Sample]
    rejected: list[Rejected]
    statistics: Statistics


@dataclass
class Statistics:
    """Statistics of the accepted groups, including their dropped sequences. Means are NaN without accepted groups.

    A rollout with branches counts as one sequence, except in `seq_len_cuts`, `zeroed` and `rejected`.

    `of_groups` computes the fields without a default; `to_samples` counts the others while it makes samples.
    """

    groups: int
    sequences: int
    reward_mean: float
    """Mean of the environment's rewards, without the length penalty."""
    reward_std: float
    """Standard deviation over all rollouts, ddof = 0."""
    reward_parts: dict[str, float]
    """Mean of each reward part, over the sequences with a value for that part."""
    source_rewards: dict[str, float]
    """Mean reward of each source of a run with `sources` (`meta.source` of the groups)."""
    completion_tokens_mean: float
    """Sampled tokens per sequence, before the cut at seq_len."""
    cut_off_share: float
    """Fraction of sequences whose completion reached max_tokens."""
    staleness: list[int] = field(default_factory=list)
    """Steps, one entry per group, in the order of group ids."""
    zero_advantage_share: float = math.nan
    """Fraction of groups with only zero advantages. Only penalties give these groups a gradient."""
    seq_len_cuts: int = 0
    """Sequences that were cut at seq_len."""
    overlong_filtered: int = 0
    """Sequences without trained tokens because they were truncated at max_tokens."""
    overlong_punished: int = 0
    """Sequences with a length penalty."""
    zeroed: int = 0
    """Sequences whose advantage an override set to zero."""
    rejected: dict[Reason, int] = field(default_factory=dict)
    """Dropped groups and sequences per reason; a whole group counts once."""
    unknown_overrides: dict[str, int] = field(default_factory=dict)
    """Count of unknown overrides per key."""

    @classmethod
    def of_groups(cls, groups: Sequence[TrajectoryGroup]) -> Statistics:
        """Computes the statistics of the accepted groups, without the counts."""
        rewards = np.concatenate([np.empty(0), *(rollout_rewards(group) for group in groups)])
        cuts = np.concatenate([np.empty(0), *(truncated(group) for group in groups)])
        lengths = np.concatenate([np.empty(0), *(completion_tokens(group) for group in groups)])
        return cls(
            groups=len(groups),
            sequences=len(rewards),
            reward_mean=_mean(rewards),
            reward_std=float(rewards.std()) if len(rewards) else math.nan,
            reward_parts=_parts(groups),
            source_rewards=_source_rewards(groups),
            completion_tokens_mean=_mean(lengths),
            cut_off_share=_mean(cuts),
        )


def to_samples(groups: Sequence[TrajectoryGroup], limits: Limits, settings: Hyperparameters) -> Prepared:
    """Checks a step's groups, computes advantages and splits the groups into samples.

    Samples are in the order of group ids, then in their order in the group. The result therefore does not depend on
    the order of `groups`, which a repeated lease does not keep.
    """
    rejected: list[Rejected] = []
    taken: list[tuple[TrajectoryGroup, Overrides]] = []
    for group in sorted(groups, key=lambda group: group.group_id):
        try:
            found = check_group(group, limits)
            if found is None:
                taken.append((group, read_overrides(group)))
                continue
        except OverridesError as error:
            found = Rejected(group.group_id, None, Reason.OVERRIDES, str(error))
        rejected.append(found)

    kept = [group for group, _ in taken]
    statistics = Statistics.of_groups(kept)
    samples: list[Sample] = []
    zero_groups = 0
    overlong: set[tuple[str, int]] = set()
    unknown: Counter[str] = Counter()
    rewards = [_rewards(group, settings, statistics) for group in kept]
    by_rewards = advantages(rewards, settings.advantage_scale)
    for (group, overrides), of_rollouts in zip(taken, by_rewards, strict=True):
        flat = _per_token(group, of_rollouts, overrides)
        statistics.staleness.append(staleness(group, limits.policy))
        zero_groups += not flat[group.mask].any()
        statistics.zeroed += int(overrides.zeroed.sum())
        unknown += overrides.unknown
        filtered = truncated(group) if settings.overlong == "filter" else np.zeros(group.rollout_count, np.bool_)
        rollout_of = group.rollout_of.tolist()
        for index, sample in enumerate(sequences(group, flat, limits.seq_len, distill=settings.distill_coef > 0)):
            if wrong := check_sample(sample, limits, settings.token_budget):
                rejected.append(Rejected(group.group_id, index, *wrong))
                continue
            statistics.seq_len_cuts += int(group.lengths[index]) > limits.seq_len
            if filtered[rollout_of[index]]:
                overlong.add((group.group_id, rollout_of[index]))
                sample = _untrained(sample)
            samples.append(sample)
    statistics.overlong_filtered = len(overlong)
    if settings.token_budget is not None and settings.joins_branches:
        samples, too_long = _split_at_budget(samples, settings.token_budget)
        rejected += too_long
    if kept:
        statistics.zero_advantage_share = zero_groups / len(kept)
    statistics.rejected = dict(sorted(Counter(one.reason for one in rejected).items()))
    statistics.unknown_overrides = dict(sorted(unknown.items()))
    _log_rejected(rejected)
    return Prepared(samples, rejected, statistics)


def _rewards(group: TrajectoryGroup, settings: Hyperparameters, statistics: Statistics) -> F64:
    """Returns f64[R]: rewards with the length penalty, and counts the rollouts with a penalty."""
    rewards = rollout_rewards(group)
    if settings.overlong_buffer is None or group.advantages is not None:
        return rewards
    lowered = length_penalty(
        longest_reply(group), group.sampling.max_tokens, settings.overlong_buffer, settings.overlong_penalty
    )
    statistics.overlong_punished += int((lowered < 0).sum())
    return rewards + lowered


def _per_token(group: TrajectoryGroup, of_rollouts: F32, overrides: Overrides) -> F32:
    """Returns f32[N]: the environment's advantages if it sent them, else each rollout's advantage at its tokens."""
    sent = group.advantages
    flat = np.repeat(of_rollouts[group.rollout_of], group.lengths) if sent is None else sent
    # `where`, not a product, because NaN times zero is NaN.
    return np.where(np.repeat(overrides.zeroed, group.lengths), np.float32(0), flat)


def sequences(group: TrajectoryGroup, flat_advantages: F32, seq_len: int, *, distill: bool) -> Iterator[Sample]:
    """Yields the sequences of a group, each cut at `seq_len` tokens. `flat_advantages`: f32[N], of the group's tokens.
    `distill`: whether a teacher's tokens are trained on; otherwise they are left out, and not checked."""
    bounds = itertools.accumulate(group.lengths.tolist(), initial=0)
    teacher_ids = teacher_logprobs = None
    rollout = group.logprobs if group.logprobs_known else np.full_like(group.logprobs, np.nan)
    if distill and group.distill_ids is not None and group.distill_logprobs is not None:
        teacher_ids = group.distill_ids.reshape(len(group.tokens), -1)
        teacher_logprobs = group.distill_logprobs.reshape(len(group.tokens), -1)
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        piece = slice(start, min(end, start + seq_len))
        trained = group.mask[piece].copy()
        trained[0] = False  # No token predicts the first token.
        yield Sample(
            group_id=group.group_id,
            tokens=group.tokens[piece],
            trained=trained,
            rollout_logprobs=np.where(trained, rollout[piece], np.float32(0)),
            rollout_known=group.logprobs_known,
            advantages=flat_advantages[piece],
            temperature=group.sampling.temperature,
            ref_logprobs=None if group.ref_logprobs is None else group.ref_logprobs[piece],
            teacher=(
                Teacher(teacher_ids[piece], teacher_logprobs[piece])
                if teacher_ids is not None and teacher_logprobs is not None
                else None
            ),
            sequence=index,
            rollout=None if group.rollouts is None else int(group.rollouts[index]),
        )


def _split_at_budget(samples: Sequence[Sample], budget: int) -> tuple[list[Sample], list[Rejected]]:
    """Returns the samples of rollouts that fit in one micro-batch, and rejects the samples of longer rollouts."""
    rollouts = rollouts_of(samples)
    lengths = np.bincount(rollouts, [len(sample) for sample in samples]).astype(np.int64)[rollouts].tolist()
    rejected = [
        Rejected(
            sample.group_id,
            sample.sequence,
            Reason.OVER_TOKEN_BUDGET,
            f"the branches of its rollout have {length} tokens together; token_budget is {budget}",
        )
        for sample, length in zip(samples, lengths, strict=True)
        if length > budget
    ]
    return [sample for sample, length in zip(samples, lengths, strict=True) if length <= budget], rejected


def _untrained(sample: Sample) -> Sample:
    nothing = np.zeros_like(sample.trained)
    return replace(sample, trained=nothing, rollout_logprobs=np.zeros_like(sample.rollout_logprobs))


def _log_rejected(rejected: Sequence[Rejected]) -> None:
    """Logs one line per reason, with the first case."""
    for reason in dict.fromkeys(one.reason for one in rejected):
        cases = [one for one in rejected if one.reason is reason]
        first = cases[0]
        whose = first.group_id if first.sequence is None else f"{first.group_id}, sequence {first.sequence}"
        _LOG.warning("not trained on, %s: %d, such as %s: %s", reason, len(cases), whose, first.detail)


def _mean(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _parts(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    names = dict.fromkeys(name for group in groups for name in group.reward_parts)
    parts = {
        name: [
            value
            for group in groups
            if name in group.reward_parts
            for start in group.rollout_starts.tolist()
            if (value := group.reward_parts[name][start]) is not None
        ]
        for name in names
    }
    return {name: sum(values) / len(values) for name, values in parts.items() if values}


def _source_rewards(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for group in groups:
        if isinstance(source := group.meta.get("source"), str):
            found.setdefault(source, []).extend(rollout_rewards(group).tolist())
    return {source: sum(rewards) / len(rewards) for source, rewards in sorted(found.items())}
