"""Why a group is given up."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from gristmill_env.errors import (
    DatasetError,
    EnvError,
    EpisodeError,
    PromptError,
    PromptRefusedError,
    PromptTooLongError,
    RequestTimeoutError,
)


class DropReason(StrEnum):
    """Recorded and counted by the API; the row's permit is spent, its room in the step is free again."""

    SAME_SCORES = "same_scores"
    """All completions score the same, so that no one is better than the others: no gradient."""
    TOO_LONG = "too_long"
    """The prompt leaves no room for a completion within max_token_length."""
    PROMPT_REFUSED = "prompt_refused"
    """A text server refuses the prompt, though it takes others."""
    REWARD_ERROR = "reward_error"
    """Rewards failed on so many of its completions that fewer than two are left. A score of 0 in their place would
    teach something wrong."""
    NO_SCORE = "no_score"
    """The rewards had nothing to say of so many of its completions that fewer than two are left."""
    ENVIRONMENT_ERROR = "environment_error"
    """The environment failed in one of its attempts."""
    TIMEOUT = "timeout"
    """It took more than worker_timeout, or a request of it more than its server's timeout."""
    BAD_ROW = "bad_row"
    """The row has no text where the prompt or the answer should be."""
    REFUSED = "refused"
    """The API does not accept the group."""


_OF_A_ROW: Mapping[type[EnvError], DropReason] = {
    PromptTooLongError: DropReason.TOO_LONG,
    PromptRefusedError: DropReason.PROMPT_REFUSED,
    RequestTimeoutError: DropReason.TIMEOUT,
    DatasetError: DropReason.BAD_ROW,
    PromptError: DropReason.BAD_ROW,
    EpisodeError: DropReason.ENVIRONMENT_ERROR,
}
ROW_ERRORS = tuple(_OF_A_ROW)
"""What goes wrong with one row and says nothing of the next: the row is given up, and the work goes on."""


def reason_of(error: EnvError) -> DropReason:
    """Why a row that failed with `error`, one of ROW_ERRORS, is given up."""
    return next(reason for kind, reason in _OF_A_ROW.items() if isinstance(error, kind))
