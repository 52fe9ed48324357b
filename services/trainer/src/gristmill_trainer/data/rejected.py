"""What is not trained on, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a group or a sequence of it was dropped. The values are the names under which they are counted."""

    WRONG_LENGTHS = "wrong_lengths"
    """Group: an array has another length than the group's tokens or sequences."""
    REWARDS = "rewards"
    """Group: a reward is NaN or infinite; its group's baseline is then no number either."""
    STALE = "stale"
    """Group: its oldest token was sampled by weights further back than max_staleness."""
    OVERRIDES = "overrides"
    """Group: its overrides are of a wrong type, or it cannot be told whose they are."""
    DISTILLATION = "distillation"
    """Group: the teacher's tokens and log-probabilities do not fit the group's tokens or one another. Sequence: one
    of them is no token and no log-probability."""
    OUTSIDE_VOCABULARY = "outside_vocabulary"
    """Sequence: a token id that the model has no embedding for."""
    NOTHING_TRAINED = "nothing_trained"
    """Sequence: no trained token is left, without the first one and what is beyond seq_len."""
    LOGPROBS = "logprobs"
    """Sequence: a trained token's log-probability is NaN, infinite or positive."""
    REF_LOGPROBS = "ref_logprobs"
    """Sequence: the same of the reference model's."""
    ADVANTAGES = "advantages"
    """Sequence: the environment sent an advantage that is NaN or infinite."""
    OVER_TOKEN_BUDGET = "over_token_budget"
    """Sequence: longer than token_budget, so that it fits no micro-batch."""


@dataclass(frozen=True)
class Rejected:
    """A group, or one sequence of it, that is not trained on."""

    group_id: str
    sequence: int | None
    """Place in its group; None: the whole group."""
    reason: Reason
    detail: str
