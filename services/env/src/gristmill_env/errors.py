"""The errors of the environment, and the reasons for dropping a row.

Every message names the thing, the place and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from gristmill import GristmillError
from gristmill_env.values import whole

if TYPE_CHECKING:  # groups.py imports this module
    from gristmill_env.rollouts.groups import Rollout


class EnvError(GristmillError):
    """The base class of all errors of the environment."""

    may_pass = False
    """Whether the error is of a service that may answer later. (`outages.may_pass` also reads an error's causes.)"""
    unfinished: Rollout | None = None
    """The rollout up to the error, if the error ended a rollout that had a reply."""
    rollouts: Sequence[Rollout] = ()
    """The group's rollouts up to the error, finished and unfinished, if the error ended a group."""
    failed: Sequence[EnvError] = ()
    """The errors of the group's rollouts that failed before, if the error ended a group."""

    def __init__(self, code: str, message: str, /, **values: object) -> None:
        """Replaces half characters in `message`, which may quote a user's code, so that files and logs can hold it."""
        super().__init__(code, whole(message), **values)

    def passing(self, may_pass: bool = True) -> Self:
        """Sets `may_pass`, and returns the error."""
        self.may_pass = may_pass
        return self


class DatasetError(EnvError):
    """The data set cannot be found or read, or lacks a field that the configuration names."""


class PromptError(EnvError):
    """A row cannot be made into a prompt, or no tokenizer is available."""


class RewardError(EnvError):
    """A reward is not registered, or cannot be configured as asked."""


class InferenceError(EnvError):
    """The model server cannot be used: unreachable, another model, or no token ids."""


class UnpublishedWeightsError(InferenceError):
    """A completion was sampled with weights that the trainer did not publish, because the server was restarted."""


class PromptTooLongError(EnvError):
    """The prompt leaves no room for a completion."""


class RequestTimeoutError(EnvError):
    """A request for completions failed for `patience` seconds, at servers that answer other requests."""


class RolloutTimeoutError(EnvError):
    """A rollout took longer than `rollout_timeout`, or was not finished when `group_timeout` ended its group."""


class PromptRefusedError(EnvError):
    """A server refuses this prompt, although it accepts others: too long, an unknown token, or a content filter."""


class EpisodeError(EnvError):
    """An environment is not registered, cannot be configured as asked, or failed in a rollout."""


class SavedError(EnvError):
    """Saved groups cannot be read or written, or lack data that a command needs."""


class CheckError(EnvError):
    """`check` found mistakes and has shown them."""


class EvaluationError(EnvError):
    """An evaluation cannot be started, resumed or compared as requested."""


class BusyEvaluationError(EvaluationError):
    """Another process has the evaluation's folder open."""


class DropReason(StrEnum):
    """The API records and counts the reason. The row's permit is spent, and its place in the step is free again.

    gristmill_env.progress.REASONS has the cause and the remedy of each reason.
    """

    SAME_SCORES = "same_scores"
    TOO_LONG = "too_long"
    REWARD_ERROR = "reward_error"
    """A score of 0 for a failure would teach the model something wrong."""
    NO_SCORE = "no_score"
    ENVIRONMENT_ERROR = "environment_error"
    TIMEOUT = "timeout"
    BAD_ROW = "bad_row"
    PROMPT_REFUSED = "prompt_refused"
    REFUSED = "refused"
    STALE = "stale"


_OF_A_ROW: Mapping[type[EnvError], DropReason] = {
    PromptTooLongError: DropReason.TOO_LONG,
    PromptRefusedError: DropReason.PROMPT_REFUSED,
    RequestTimeoutError: DropReason.TIMEOUT,
    RolloutTimeoutError: DropReason.TIMEOUT,
    DatasetError: DropReason.BAD_ROW,
    PromptError: DropReason.BAD_ROW,
    EpisodeError: DropReason.ENVIRONMENT_ERROR,
}
ROW_ERRORS = tuple(_OF_A_ROW)
"""Errors of one row that do not affect the next row. The row is dropped, and the work continues."""
ROLLOUT_ERRORS = (EpisodeError, RequestTimeoutError, RolloutTimeoutError)
"""Errors of one rollout that another rollout of the row need not have. The rollout is tried again."""


def reason_of(error: EnvError) -> DropReason:
    """Returns the reason for dropping a row that failed with `error`, one of ROW_ERRORS."""
    return next(reason for kind, reason in _OF_A_ROW.items() if isinstance(error, kind))
