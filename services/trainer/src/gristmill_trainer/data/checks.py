"""Checks of groups and sequences. A bad group or sequence is dropped with a counted reason; the others are trained on.

`TrajectoryGroup` itself refuses arrays of wrong lengths and numbers that are not finite. The checks here need the
model, the run or the settings.

A dropped group is dropped as a whole. The reward of a dropped sequence still counts in its group's mean and standard
deviation, because only its tokens are unusable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gristmill import PolicyVersion, RunRecord, TrajectoryGroup
from gristmill.run import Protocol
from gristmill_trainer.data.types import F32, I32, Reason, Rejected, Sample

HIGHEST_LOGPROB = 1e-3
"""Highest log-probability, which allows for rounding of log 1. The SDK uses the same bound."""


HIGHEST_SUM = 1.01
"""Highest sum of a teacher's probabilities, which allows for rounding of bfloat16 log-probabilities."""


@dataclass(frozen=True)
class Limits:
    """Limits of a step's data."""

    vocabulary: int
    """Token ids are 0 to vocabulary - 1: rows of the model's embedding."""
    seq_len: int
    """Longest sequence; further tokens are cut off."""
    policy: PolicyVersion
    """Version of the weights at the start of the step."""
    max_staleness: int | None = None
    """Most steps between these weights and a group's oldest token; None: no bound."""


def staleness_bound(run: RunRecord) -> int | None:
    """Returns the run's staleness bound; None with Atropos' protocol, which has no permits and therefore no bound."""
    return None if run.protocol is Protocol.ATROPOS else run.max_staleness


def staleness(group: TrajectoryGroup, policy: PolicyVersion) -> int:
    """Returns the steps between the oldest weights that sampled a token of the group and the weights in training.

    Below 0 if a killed trainer had published later steps than its successor has reached.
    """
    return policy.step - group.oldest_version.step


def check_group(group: TrajectoryGroup, limits: Limits) -> Rejected | None:
    """Returns the problem that makes the whole group unusable, or None."""
    stale = staleness(group, limits.policy)
    if limits.max_staleness is None or stale <= limits.max_staleness:
        return None
    detail = f"sampled by {group.oldest_version}, {stale} steps back; max_staleness is {limits.max_staleness}"
    return Rejected(group.group_id, None, Reason.STALE, detail)


def check_sample(sample: Sample, limits: Limits, token_budget: int | None) -> tuple[Reason, str] | None:
    """Returns the first problem that makes a sequence unusable, or None. The sample is already cut at seq_len."""
    trained = sample.trained
    highest = int(sample.tokens.max())
    if highest >= limits.vocabulary:
        return Reason.OUTSIDE_VOCABULARY, f"token {highest} is not among the model's {limits.vocabulary}"
    if not trained.any():
        return Reason.NOTHING_TRAINED, f"none of its {len(sample)} tokens is trained (seq_len is {limits.seq_len})"
    if sample.ref_logprobs is not None and (wrong := _positive(sample.ref_logprobs[trained])):
        return Reason.REF_LOGPROBS, wrong
    if sample.teacher is not None:
        ids, logprobs = sample.teacher.ids[trained], sample.teacher.logprobs[trained]
        if (ids >= limits.vocabulary).any():
            return Reason.DISTILLATION, f"a teacher's token is not among the model's {limits.vocabulary}"
        if wrong := _positive(logprobs[ids >= 0]) or _no_distribution(ids, logprobs):
            return Reason.DISTILLATION, f"the teacher's: {wrong}"
    if token_budget is not None and len(sample) > token_budget:
        return Reason.OVER_TOKEN_BUDGET, f"{len(sample)} tokens; token_budget is {token_budget}"
    return None


def _no_distribution(ids: I32, logprobs: F32) -> str | None:
    """Returns the problem of a teacher's distributions, or None. `ids` and `logprobs`: [M, K]."""
    ordered = np.sort(ids, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        return "a token is there twice at one position"
    highest = float(np.where(ids >= 0, np.exp(logprobs), 0).sum(axis=1).max(initial=0))
    if highest > HIGHEST_SUM:
        return f"the probabilities of one position add up to {highest:.4f}"
    return None


def _positive(logprobs: F32) -> str | None:
    highest = float(logprobs.max(initial=0))
    return f"a log-probability is positive: {highest:.4f}" if highest > HIGHEST_LOGPROB else None
