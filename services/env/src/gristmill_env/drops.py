"""Why a group is given up."""

from __future__ import annotations

from enum import StrEnum


class DropReason(StrEnum):
    """Recorded and counted by the API; the row's permit is spent, its room in the step is free again."""

    SAME_SCORES = "same_scores"
    """All completions score the same, so that no one is better than the others: no gradient."""
    TOO_LONG = "too_long"
    """The prompt leaves no room for a completion within max_token_length."""
    REWARD_ERROR = "reward_error"
    """A reward failed on one of its completions. A score of 0 in its place would teach something wrong."""
    NO_SCORE = "no_score"
    """No reward had anything to say of one of its completions."""
    BAD_ROW = "bad_row"
    """The row has no text where the prompt or the answer should be."""
    REFUSED = "refused"
    """The API does not accept the group."""
