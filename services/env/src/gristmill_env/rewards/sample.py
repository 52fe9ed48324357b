"""What a reward may look at, and what was said of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_IMMUTABLE = frozenset({str, int, float, bool, bytes, complex, type(None)})


@dataclass(frozen=True)
class Sample:
    """One completion to be scored, with the row that it answers."""

    completion: str
    """The completion's text, special tokens left out. It begins with what the prompt holds of it: the prefill, and a
    `<think>` that the chat template opened."""
    answer: str | None = None
    """What the completion is compared with: the row's `ground_truth_field` where that is set, else its `answer_field`;
    None when the run has neither."""
    prompt: str = ""
    """The row's `prompt_field`."""
    tokens: Sequence[int] | None = None
    """The completion's token ids, as sampled; None where they are not known: a reward that asks for them fails."""
    finish_reason: str = "stop"
    """Why the completion ended: "stop", or "length" when it was cut."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The prompt as chat messages ({role, content}), the system message included, the completion left out."""
    conversation: Sequence[Mapping[str, Any]] = ()
    """All messages of the attempt, the model's included."""
    episode_reward: float | None = None
    """What the run's `environment` gave for the attempt; None where it gives none."""
    conversational: bool = False
    """Whether the row's own prompt is a list of messages. Decides what a TRL reward is given."""
    step: int | None = None
    """Optimizer steps that the sampling weights have had; None where nothing is trained. For TRL rewards."""


@dataclass(frozen=True)
class Detailed:
    """What a reward may return in place of a number: its value, and what that is made of."""

    value: float | None
    parts: Mapping[str, float | Exception | None]
    """By name, shown beside the reward as "reward/part". An exception: this part failed, and the value stands."""


@dataclass(frozen=True)
class Failure:
    """A reward gave no value where it should have."""

    reward: str
    text: str
    """What went wrong, without secrets."""
    code: str
    """The error's code, "reward_raised" if the reward's code raised an error that has none."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The error's values."""
    cause: BaseException | None = field(default=None, compare=False)
    """What the reward raised; None if a worker process reported the failure."""

    def __str__(self) -> str:
        return f"{self.reward}: {self.text}"


@dataclass(frozen=True)
class Score:
    """What the rewards said of one completion."""

    total: float | None
    """Sum of weight × value over the rewards that have a value; None when none has, or one that counts failed."""
    parts: Mapping[str, float | None]
    """Value of each reward before its weight, those inside a composed one too ("combined/accuracy"); None where it
    said nothing or failed."""
    error: str | None = None
    """The first reward of weight that failed, and how."""
    failed: Mapping[str, Failure] = field(default_factory=dict)
    """Every reward that failed, and how: a metric (weight 0) fails here without costing the sample its total."""


def private(value: Any) -> Any:
    """A copy that may be changed: what one reward does to its row, others do not see. Texts and numbers are not copied.

    An object that cannot be copied is handed on as it is.
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
    except Exception:  # noqa: BLE001  whatever an object raises that is not made for copies
        return value
