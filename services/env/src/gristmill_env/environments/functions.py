"""Functions as tools: their JSON schemas, the check of a call's arguments, and results as text."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MethodType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gristmill_env.errors import EpisodeError
from gristmill_env.values import whole

Tool = Mapping[str, Any] | Callable[..., Any]
"""A JSON schema in OpenAI's form, {"type": "function", "function": {...}}, or a function."""


class ArgumentsError(Exception):
    """The model called a tool with arguments that it does not take."""


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns a function's JSON schema in OpenAI's form, from its type hints and its docstring in Google's style.

    Raises EpisodeError if a hint or a description is missing.
    """
    get_json_schema = schemas()
    name = getattr(function, "__name__", repr(function))
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        raise EpisodeError(
            "tool_without_schema",
            f"the tool {name} has no schema: {error}. A tool needs a type hint and a description for each argument: "
            "a docstring with a line 'Args:' and a line 'name: text' for each",
            tool=name,
        ) from error
    schema["function"].pop("return", None)
    return schema


def schemas() -> Callable[[Callable[..., Any]], dict[str, Any]]:
    """Returns the function that makes schemas. Takes seconds at the first call, and few environments have tools."""
    from transformers.utils.chat_template_utils import get_json_schema

    made: Callable[[Callable[..., Any]], dict[str, Any]] = get_json_schema
    return made


def checked_arguments(function: Callable[..., Any], arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the arguments of a call, converted to the types of the function's hints. Raises ArgumentsError."""
    if arguments is None:
        raise ArgumentsError("the arguments are not a JSON object")
    # The key of the cache must not hold a method's object.
    plain, bound = (function.__func__, True) if isinstance(function, MethodType) else (function, False)
    parameters, adapters = _signature(plain, bound)
    if unknown := [name for name in arguments if name not in parameters]:
        raise ArgumentsError(f"unknown argument {unknown[0]}; known are {', '.join(parameters) or 'none'}")
    missing = [
        name for name, one in parameters.items() if one.default is inspect.Parameter.empty and name not in arguments
    ]
    if missing:
        raise ArgumentsError(f"the argument {missing[0]} is missing")
    checked = {}
    for name, value in arguments.items():
        try:
            checked[name] = adapters[name].validate_python(value)
        except ValidationError as error:
            raise ArgumentsError(f"argument {name}: {error.errors()[0]['msg']}") from error
    return checked


def result_text(result: object) -> str:
    """Returns a tool's result as the text of a message: text as it is, other values as JSON if they can be."""
    if isinstance(result, str):
        return whole(result)
    try:
        return whole(json.dumps(result, ensure_ascii=False))
    except (TypeError, ValueError):
        return whole(str(result))


@lru_cache(maxsize=1024)
def _signature(
    function: Callable[..., Any], bound: bool
) -> tuple[dict[str, inspect.Parameter], dict[str, TypeAdapter[Any]]]:
    """`bound`: leaves out the parameter `self`."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = dict(list(inspect.signature(function).parameters.items())[int(bound) :])
    return parameters, {name: TypeAdapter(hints.get(name, Any)) for name in parameters}
