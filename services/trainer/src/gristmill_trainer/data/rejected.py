"""Groups and sequences that are not trained on, and the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a group or one of its sequences was dropped. The values are the names of the counts."""

    WRONG_LENGTHS = "wrong_lengths"
    """Group: an array's length does not match the group's tokens or sequences."""
    REWARDS = "rewards"
    """Group: a reward is NaN or infinite, and so is the group's baseline."""
    STALE = "stale"
    """Group: its oldest token was sampled by weights further back than max_staleness."""
    OVERRIDES = "overrides"
    """Group: its overrides have a wrong type, or do not match its sequences."""
    DISTILLATION = "distillation"
    """Group: the teacher's tokens and log-probabilities do not match the group's tokens or one another. Sequence: a
    teacher's token or log-probability is not valid."""
    OUTSIDE_VOCABULARY = "outside_vocabulary"
    """Sequence: the model has no embedding for a token id."""
    NOTHING_TRAINED = "nothing_trained"
    """Sequence: no trained token is left after removing the first token and the tokens beyond seq_len."""
    LOGPROBS = "logprobs"
    """Sequence: a trained token's log-probability is NaN, infinite or positive."""
    REF_LOGPROBS = "ref_logprobs"
    """Sequence: a trained token's reference log-probability is NaN, infinite or positive."""
    ADVANTAGES = "advantages"
    """Sequence: the environment sent an advantage that is NaN or infinite."""
    OVER_TOKEN_BUDGET = "over_token_budget"
    """Sequence: longer than token_budget, so that no micro-batch can hold it."""


@dataclass(frozen=True)
class Rejected:
    """A group, or one of its sequences, that is not trained on."""

    group_id: str
    sequence: int | None
    """Index in the group; None: the whole group."""
    reason: Reason
    detail: str
