"""What can go wrong in the environment. Every message names the thing, the place and the remedy."""

from __future__ import annotations

from gristmill import GristmillError


class EnvError(GristmillError):
    """Base of all errors of the environment."""


class RunReplacedError(EnvError):
    """The run was replaced while this process did not work on it: it stood still for longer than the API's time-out."""


class DatasetError(EnvError):
    """The data set cannot be found or read, or lacks a field that the configuration names."""


class PromptError(EnvError):
    """A row cannot be made into a prompt, or there is no tokenizer to make it with."""


class RewardError(EnvError):
    """A reward is not registered, or cannot be configured as asked."""


class InferenceError(EnvError):
    """The model server cannot be used: unreachable, another model, or no token ids."""


class UnpublishedWeightsError(InferenceError):
    """A completion was sampled by weights that no trainer published: the server was started again."""


class PromptTooLongError(EnvError):
    """The prompt leaves no room for a completion."""


class RequestTimeoutError(EnvError):
    """A request for completions was not answered in time, by servers that answer others."""


class PromptRefusedError(EnvError):
    """A text server refuses this prompt, though it takes others: too long for it, or caught by its content filter."""


class EpisodeError(EnvError):
    """An environment is not registered, cannot be configured as asked, or failed in an attempt."""


class SavedError(EnvError):
    """Saved groups cannot be read or written, or lack what is asked of them."""


class CheckError(EnvError):
    """`check` found mistakes; it has shown them."""


class EvaluationError(EnvError):
    """An evaluation cannot be begun, resumed or compared as asked."""


class BusyEvaluationError(EvaluationError):
    """Another process has the evaluation's folder open."""
