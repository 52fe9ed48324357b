"""The sample that a reward can read, and the results of rewards."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_IMMUTABLE = frozenset({str, int, float, bool, bytes, complex, type(None)})


@dataclass(frozen=True)
class Sample:
    """One completion to score, and the row that the completion answers."""

    completion: str
    """The completion's text without special tokens. Includes the start of the answer that is part of the prompt: the
    prefill, and a `<think>` that the chat template opened."""
    answer: str | None = None
    """The reference answer: the row's `ground_truth_field` if set, else its `answer_field`; None if the run has
    neither."""
    prompt: str = ""
    """The row's `prompt_field`."""
    tokens: Sequence[int] | None = None
    """The sampled token ids; None if unknown. A reward that asks for unknown token ids fails."""
    finish_reason: str = "stop"
    """The reason why the completion ended: "stop", or "length" if the completion is truncated."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The prompt as chat messages ({role, content}), with the system message and without the completion."""
    conversation: Sequence[Mapping[str, Any]] = ()
    """All messages of the attempt, including the model's messages."""
    episode_reward: float | None = None
    """The reward that the run's `environment` returned for the attempt; None if it returned no reward."""
    conversational: bool = False
    """Whether the row's prompt is a list of messages. Decides whether a TRL reward gets messages or text."""
    step: int | None = None
    """Number of optimizer steps of the sampling weights; None outside of training. For TRL rewards."""


@dataclass(frozen=True)
class Detailed:
    """A value with its parts. A reward may return this instead of a number."""

    value: float | None
    parts: Mapping[str, float | Exception | None]
    """The parts by name, shown as "reward/part". An exception means that the part failed; the value remains valid."""


@dataclass(frozen=True)
class Failure:
    """The failure of a reward on one completion."""

    reward: str
    text: str
    """The error message, without secrets."""
    code: str
    """The error's code; "reward_raised" if the error of the reward has no code."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The error's values."""
    cause: BaseException | None = field(default=None, compare=False)
    """The error that the reward raised; None if a worker process reported the failure."""

    def __str__(self) -> str:
        return f"{self.reward}: {self.text}"


@dataclass(frozen=True)
class Score:
    """The results of all rewards for one completion."""

    total: float | None
    """Sum of weight × value over the rewards that have a value. None if no reward has a value, or if a reward with a
    nonzero weight failed."""
    parts: Mapping[str, float | None]
    """Unweighted value of each reward, including the parts of composed rewards ("combined/accuracy"). None if the
    reward returned None or failed."""
    error: str | None = None
    """The name and error of the first failed reward with a nonzero weight."""
    failed: Mapping[str, Failure] = field(default_factory=dict)
    """Every failed reward and its failure. A failed metric (weight 0) is listed here, and `total` remains valid."""


def private(value: Any) -> Any:
    """Returns a copy, so that changes by one reward do not affect other rewards. Texts and numbers are not copied.

    Returns an object that cannot be copied unchanged.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is list:
        return [item if type(item) in _IMMUTABLE else private(item) for item in value]
    if kind is dict:
        return {name: item if type(item) in _IMMUTABLE else private(item) for name, item in value.items()}
    if kind is tuple:
        return tuple(map(private, value))
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  an object that does not support copies may raise any error
        return value
