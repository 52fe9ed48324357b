"""Groups -> samples: the sequences of a step that are trained on, with their advantages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gristmill import Hyperparameters, TrajectoryGroup
from gristmill_trainer.data.advantages import F64, advantages
from gristmill_trainer.data.checks import Limits, check_group, check_sample, staleness, starts, teacher_width
from gristmill_trainer.data.overlong import cut_off, longest_reply, punishment
from gristmill_trainer.data.overrides import Overrides, OverridesError, read_overrides
from gristmill_trainer.data.rejected import Reason, Rejected
from gristmill_trainer.data.sample import F32, Sample, Teacher
from gristmill_trainer.data.statistics import Statistics, Tally, log_rejected, statistics


@dataclass(frozen=True)
class Prepared:
    """A step's data. `samples` is empty if everything was rejected."""

    samples: list[Sample]
    rejected: list[Rejected]
    statistics: Statistics


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

    kept, tally = [group for group, _ in taken], Tally()
    samples: list[Sample] = []
    rewards = [_rewards(group, settings, tally) for group in kept]
    by_rewards = advantages(rewards, settings.advantage_scale)
    for (group, overrides), of_sequences in zip(taken, by_rewards, strict=True):
        flat = _per_token(group, of_sequences, overrides)
        tally.staleness.append(staleness(group, limits.policy))
        tally.zero_groups += not flat[group.mask].any()
        tally.zeroed += int(overrides.zeroed.sum())
        tally.unknown += overrides.unknown
        filtered = cut_off(group) if settings.overlong == "filter" else np.zeros(group.size, np.bool_)
        for index, sample in enumerate(_sequences(group, flat, limits)):
            if wrong := check_sample(sample, limits):
                rejected.append(Rejected(group.group_id, index, *wrong))
                continue
            tally.cuts += int(group.lengths[index]) > limits.seq_len
            tally.filtered += bool(filtered[index])
            samples.append(_untrained(sample) if filtered[index] else sample)
    log_rejected(rejected)
    return Prepared(samples, rejected, statistics(kept, rejected, tally))


def _rewards(group: TrajectoryGroup, settings: Hyperparameters, tally: Tally) -> F64:
    """Returns f64[G]: rewards with the length penalty."""
    rewards = group.rewards.astype(np.float64)
    if settings.overlong_buffer is None or group.advantages is not None:
        return rewards
    lowered = punishment(
        longest_reply(group), group.sampling.max_tokens, settings.overlong_buffer, settings.overlong_penalty
    )
    tally.punished += int((lowered < 0).sum())
    return rewards + lowered


def _per_token(group: TrajectoryGroup, of_sequences: F32, overrides: Overrides) -> F32:
    """Returns f32[N]: the environment's advantages if it sent them, else each sequence's advantage at its tokens."""
    sent = group.advantages
    flat = np.repeat(of_sequences, group.lengths) if sent is None else sent
    # `where`, not a product, because NaN times zero is NaN.
    return np.where(np.repeat(overrides.zeroed, group.lengths), np.float32(0), flat)


def _sequences(group: TrajectoryGroup, flat_advantages: F32, limits: Limits) -> Iterator[Sample]:
    bounds, width = starts(group), teacher_width(group) if limits.distill else 0
    teacher_ids = teacher_logprobs = None
    rollout = group.logprobs if group.logprobs_known else np.full_like(group.logprobs, np.nan)
    if width and group.distill_ids is not None and group.distill_logprobs is not None:
        teacher_ids = group.distill_ids.reshape(-1, width)
        teacher_logprobs = group.distill_logprobs.reshape(-1, width)
    for start, end in itertools.pairwise(bounds):
        piece = slice(start, min(end, start + limits.seq_len))
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
        )


def _untrained(sample: Sample) -> Sample:
    nothing = np.zeros_like(sample.trained)
    return replace(sample, trained=nothing, rollout_logprobs=np.zeros_like(sample.rollout_logprobs))
