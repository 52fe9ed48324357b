"""Checks the values that a user's environment returns or sends, so that a wrong value costs its rollout and is named.

The checks run where the environment runs, not on the service's event loop, because they read the user's own objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gristmill.internal.redaction import redact_text
from gristmill_env.data import Message, message_problem, refuse_half_characters, user
from gristmill_env.errors import EpisodeError
from gristmill_env.values import finite, plain

if TYPE_CHECKING:
    from gristmill_env.environments.base import Environment, StepResult


@dataclass(frozen=True)
class EnvironmentName:
    """Names an environment and its row in errors."""

    name: str
    row: int | None

    def __str__(self) -> str:
        return self.name

    def wrong(self, method: str, verb: str, value: object, wanted: str) -> EpisodeError:
        """Returns the error for a value of a method."""
        where = "" if self.row is None else f" for row {self.row}"
        return EpisodeError(
            "environment_value",
            redact_text(f"{self.name}.{method} {verb} {value!r:.80}{where}; it must be {wanted}"),
            method=f"{self.name}.{method}",
            value=redact_text(f"{value!r:.80}"),
            row=self.row,
        )


def turn_limit(name: EnvironmentName, environment: Environment) -> int:
    """Returns the environment's `max_turns`. Raises EpisodeError if it is not a number of turns."""
    turns: Any = environment.max_turns
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise name.wrong("max_turns", "is", turns, "a whole number from 1")
    return turns


def opening_messages(name: EnvironmentName, value: object) -> Sequence[Message]:
    """Returns the messages that `reset` returned. Raises EpisodeError if the value is not such messages."""
    messages = _messages(name, "reset", value)
    if not messages:
        raise name.wrong("reset", "returned", value, "at least one message for the model to answer")
    return messages


def step_result(name: EnvironmentName, value: object) -> StepResult:
    """Returns the result that `step` returned. Raises EpisodeError if the value is not a valid result."""
    from gristmill_env.environments.base import StepResult

    if not isinstance(value, StepResult):
        raise name.wrong("step", "returned", value, "a StepResult; is a `return` missing?")
    messages = _messages(name, "step", value.messages)
    flags = [plain(flag) for flag in (value.done, value.trained)]
    for field, flag in zip(("done", "trained"), flags, strict=True):
        if not isinstance(flag, bool):
            raise name.wrong("step", f"returned {field} =", flag, "True or False")
    return StepResult(tuple(messages), flags[0], checked_reward(name, "step", value.reward), flags[1])


def checked_reward(name: EnvironmentName, method: str, value: Any) -> float | None:
    """Returns a reward. Raises EpisodeError if it is neither a finite number nor None."""
    reward = plain(value)
    number = finite(reward)
    if reward is not None and number is None:
        verb = "returned reward =" if method == "step" else "returned"
        raise name.wrong(method, verb, value, "a finite number or None")
    return number


def said_messages(name: EnvironmentName, value: Any) -> list[dict[str, Any]]:
    """Returns what `play` says to the model as messages. Raises EpisodeError for what is neither text nor messages."""
    if isinstance(value, str):
        value = user(value)
    return _messages(name, "play", [value] if isinstance(value, Mapping) else value)


def _messages(name: EnvironmentName, method: str, value: object) -> list[dict[str, Any]]:
    verb = "says" if method == "play" else "returned"
    if not isinstance(value, list | tuple):
        raise name.wrong(method, verb, value, 'a list of messages such as {"role": "user", "content": "..."}')
    for message in value:
        if message_problem(message) is not None:
            raise name.wrong(method, f"{verb} the message", message, "role and content as text")
    refuse_half_characters(value)
    return [dict(message) for message in value]
