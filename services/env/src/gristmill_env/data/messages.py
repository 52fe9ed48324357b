"""Messages of conversations, and the check of messages that a row or a user's code writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill_env.errors import PromptError
from gristmill_env.values import half_characters, is_storable, json_or_none

Message = Mapping[str, Any]
"""One message of a conversation, in the form of chat templates and servers.

`role` (system, user, assistant, tool) and `content`, text; a template may use more keys: `tool_calls` of the model's
messages, `tool_call_id` and `name` of results.
"""


def system(content: str) -> Message:
    """Returns a message with instructions for the model."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """Returns a message for the model to answer."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Returns a message by the model."""
    return {"role": "assistant", "content": content}


def refuse_half_characters(messages: Sequence[Message]) -> None:
    """Raises PromptError for the first text that holds half of a surrogate pair, which no tokenizer can read."""
    if (path := next(half_characters(messages), None)) is not None:
        at, _, field = path.partition(".")
        raise PromptError(
            "half_character",
            f"'{field}' of message {int(at) + 1} holds half a character (half of a surrogate pair), which is "
            "not text; the row or the environment that wrote the message must repair it",
            message=int(at),
            field=field,
        )


def message_problem(message: object) -> str | None:
    """Returns why a value is not a message; None if it is one.

    OpenAI's form is a message, too: `content` may be null next to `tool_calls`, whose arguments may be JSON text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return "it has no role"
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list | tuple) and all(map(_is_call, calls))):
        return "a tool call must be {id, type: function, function: {name, arguments}}"
    if not isinstance(message.get("content"), str) and not (calls and message.get("content") is None):
        return "its content is not text"
    return None if is_storable(message) else "it holds a value that JSON cannot hold"


def template_form(message: Message) -> Message:
    """Returns a message of OpenAI's form as chat templates read it: null as empty text, and arguments as objects."""
    calls = message.get("tool_calls")
    if not calls and message.get("content") is not None:
        return message
    whole = {**message, "content": message.get("content") or ""}
    if calls:
        whole["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in calls]
    return whole


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", ""), str | Mapping)
    )


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or {}
    return {**function, "arguments": object_of(arguments) if isinstance(arguments, str) else arguments}


def object_of(arguments: str) -> Any:
    """Returns the object in the text of a call's arguments, and the text itself if the model wrote no object.

    An object that cannot be stored stays text, too: with half a character, which JSON can write as an escape, an
    integer beyond 64 bits, or NaN.
    """
    decoded = json_or_none(arguments or "{}")
    storable = isinstance(decoded, dict) and next(half_characters(decoded), None) is None and is_storable(decoded)
    return decoded if storable else arguments
