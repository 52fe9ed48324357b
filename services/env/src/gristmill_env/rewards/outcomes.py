"""The result of a reward for a completion, as a run records it: a value, None, or a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gristmill.internal.redaction import redact_text
from gristmill_env.errors import EnvError, RewardError
from gristmill_env.outages import may_pass
from gristmill_env.running.limiter import CallError
from gristmill_env.values import finite, message_of


@dataclass(frozen=True)
class RewardResult:
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
    """The error that the reward raised; None if it was raised in another process."""
    trace: str = field(default="", compare=False)
    """The traceback of an error that was raised in another process; only of the first failure of a call."""
    may_pass: bool = field(default=False, compare=False)
    """Whether the failure is of a service that may answer later."""

    def __str__(self) -> str:
        return f"{self.reward}: {self.text}"

    def raised(self) -> RewardError:
        """Returns the failure as an error. Its text names the reward."""
        return RewardError(self.code, str(self), **self.values)


Outcome = float | str | Failure | None
"""A value, None for no value, or a failure, which is never a 0. Text is the outcome of an extraction of answers."""

Outcomes = dict[str, Outcome]
"""The result of one reward for one completion: first its own outcome, then its parts' outcomes, by full name ("judge",
"judge/style"). All rewards have results of this form: called here, in another process, or composed of others."""


def outcomes_of(reward: str, value: object) -> Outcomes:
    """Returns the outcomes of a completion for which the reward returned `value`."""
    if not isinstance(value, RewardResult):
        return {reward: _outcome(reward, value)}
    if not isinstance(value.parts, Mapping) or not all(isinstance(name, str) for name in value.parts):
        wrong = f"parts of a RewardResult have a name each, not {short(value.parts)}"
        return {reward: Failure(reward, wrong, "value_invalid")}
    parts = {f"{reward}/{part}": item for part, item in value.parts.items()}
    return {reward: _outcome(reward, value.value)} | {name: _outcome(name, item) for name, item in parts.items()}


def _outcome(reward: str, value: object) -> Outcome:
    if isinstance(value, Exception):
        return failure_of(reward, value)
    if hasattr(value, "tolist"):  # a number of numpy or torch
        value = value.tolist()
    if value is None:
        return None
    if (number := finite(value)) is not None:
        return number
    return Failure(reward, f"a reward returns a finite number or None, not {short(value)}", "value_invalid")


def answer_of(reward: str, value: object) -> Outcomes:
    """Returns the outcome of an extraction that returned `value`."""
    assert value is None or isinstance(value, str)  # as `Reward.extracted` promises
    return {reward: value}


def failure_of(reward: str, error: BaseException, hint: str = "") -> Failure:
    """Returns the failure for an `error` of a reward or of its call. `hint`: text added to a TypeError."""
    if isinstance(error, EnvError):
        cause = None if isinstance(error, CallError) else error
        text = redact_text(message_of(error))
        return Failure(reward, text, error.code, error.values, cause, may_pass=may_pass(error))
    kind = type(error).__name__
    text = redact_text(f"{kind}: {message_of(error)}{hint if isinstance(error, TypeError) else ''}")
    return Failure(reward, text, "reward_raised", {"error": kind}, error, may_pass=may_pass(error))


def short(value: object) -> str:
    """Returns the beginning of a value's repr, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
