"""Checks the values that a user's environment returns, so that a wrong value costs its row and names its method.

The checks run where the method ran, not on the service's event loop, because they read the user's own objects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from gristmill.redaction import redact_text
from gristmill_env.data import Message
from gristmill_env.environments.base import Environment, StepResult
from gristmill_env.errors import EpisodeError
from gristmill_env.values import is_storable


def opening_messages(environment: Environment, row: int, value: object) -> Sequence[Message]:
    """Returns the messages that `reset` returned for a row. Raises EpisodeError if the value is not such messages."""
    turns = environment.max_turns
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise _wrong(environment, "max_turns", "is", turns, row, "a whole number from 1")
    messages = _messages(environment, "reset", value, row)
    if not messages:
        raise _wrong(environment, "reset", "returned", value, row, "at least one message for the model to answer")
    return list(messages)


def step_result(environment: Environment, row: int | None, value: object) -> StepResult:
    """Returns the result that `step` returned for a row. Raises EpisodeError if the value is not a valid result."""
    if not isinstance(value, StepResult):
        raise _wrong(environment, "step", "returned", value, row, "a StepResult; is a `return` missing?")
    messages = _messages(environment, "step", value.messages, row)
    flags = [_plain(flag) for flag in (value.done, value.trained)]
    for name, flag in zip(("done", "trained"), flags, strict=True):
        if not isinstance(flag, bool):
            raise _wrong(environment, "step", f"returned {name} =", flag, row, "True or False")
    reward = _plain(value.reward)
    if reward is not None and not _is_finite(reward):
        raise _wrong(environment, "step", "returned reward =", value.reward, row, "a finite number or None")
    return StepResult(messages, flags[0], None if reward is None else float(reward), flags[1])


def _messages(environment: Environment, method: str, value: object, row: int | None) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple):
        wanted = 'a list of messages such as {"role": "user", "content": "..."}'
        raise _wrong(environment, method, "returned", value, row, wanted)
    for message in value:
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts) or not is_storable(message):
            raise _wrong(environment, method, "returned the message", message, row, "role and content as text")
    return tuple(value)


def _plain(value: Any) -> Any:
    """Returns the number or truth value of an array or tensor without dimensions."""
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def _wrong(
    environment: Environment, method: str, verb: str, value: object, row: int | None, wanted: str
) -> EpisodeError:
    name = f"{type(environment).__name__}.{method}"
    where = "" if row is None else f" for row {row}"
    return EpisodeError(
        "environment_value",
        redact_text(f"{name} {verb} {value!r:.80}{where}; it must be {wanted}"),
        method=name,
        value=redact_text(f"{value!r:.80}"),
        row=row,
    )
