"""The environment's errors. Every message names the thing, the place and the remedy."""

from __future__ import annotations

from gristmill import GristmillError


class EnvError(GristmillError):
    """The base class of all errors of the environment."""


class RunReplacedError(EnvError):
    """The run was replaced while this process was suspended for longer than the API's time-out."""


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
    """A request for completions was not answered in time, by servers that answer other requests."""


class PromptRefusedError(EnvError):
    """A text server refuses this prompt, although it accepts others: too long, or caught by a content filter."""


class EpisodeError(EnvError):
    """An environment is not registered, cannot be configured as asked, or failed in an attempt."""


class SavedError(EnvError):
    """Saved groups cannot be read or written, or lack data that a command needs."""


class CheckError(EnvError):
    """`check` found mistakes and has shown them."""


class EvaluationError(EnvError):
    """An evaluation cannot be started, resumed or compared as requested."""


class BusyEvaluationError(EvaluationError):
    """Another process has the evaluation's folder open."""
