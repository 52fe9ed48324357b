"""The signature of a reward: its inputs and its options.

A function's arguments are inputs, and its keyword-only arguments are options. For a class, `__init__` takes the options
(keyword-only) and `__call__` takes the inputs.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from gristmill.redaction import redact
from gristmill.settings.nearest import did_you_mean
from gristmill_env.errors import RewardError

REQUIRED = inspect.Parameter.empty
"""Marks an option without a default."""


@dataclass(frozen=True)
class Argument:
    """An input that a reward asks for by name."""

    name: str
    optional: bool
    """Whether the argument has a default, used if the run does not have this input."""


@dataclass(frozen=True)
class Option:
    """A parameter of a reward that a configuration sets under `params`."""

    type: TypeAdapter[Any]
    default: Any
    """REQUIRED if the option has no default."""


@dataclass(frozen=True)
class Signature:
    """Inputs and options of one reward."""

    inputs: tuple[Argument, ...]
    options: Mapping[str, Option]

    def check(self, reward: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `params` converted to the types that the options declare.

        Raises RewardError if an option does not exist; the message lists all options and suggests the nearest. Also
        raises RewardError if a value has another type, or if an option without a default is not set.
        """
        checked = {}
        for key, value in params.items():
            if key not in self.options:
                has = ", ".join(self.options) or "none"
                raise RewardError(
                    "unknown_parameter",
                    f"reward '{reward}' has no parameter '{key}'; it has {has}.{did_you_mean(str(key), self.options)}",
                    reward=reward,
                    parameter=key,
                    known=list(self.options),
                )
            try:
                checked[key] = self.options[key].type.validate_python(value)
            except ValidationError as error:
                first = error.errors()[0]
                where = "".join(f"[{step!r}]" for step in first["loc"])
                reason = f"parameter '{key}'{where} of reward '{reward}': {first['msg']} (found {redact(value, key)!r})"
                raise RewardError(
                    "parameter_invalid", reason, reward=reward, parameter=f"{key}{where}", problem=first["type"]
                ) from error
        if missing := [key for key, option in self.options.items() if option.default is REQUIRED and key not in params]:
            raise RewardError(
                "parameter_missing",
                f"reward '{reward}' needs the parameter '{missing[0]}'; set it under params",
                reward=reward,
                parameter=missing[0],
            )
        return checked


def read_signature(reward: str, target: Callable[..., Any]) -> Signature:
    """Reads the signature of a function, a class, or another callable.

    Raises RewardError for arguments that cannot be filled by name: *args, **kwargs, positional-only arguments. Also
    raises RewardError for options in the wrong place, and for an option's annotation that cannot be read.
    """
    if not inspect.isclass(target):
        return Signature(*_split(reward, target))
    if not any("__call__" in vars(base) for base in target.__mro__):
        raise RewardError(
            "reward_not_callable",
            f"reward '{reward}' is a class ({place(target)}) without __call__; its inputs belong there",
            reward=reward,
        )
    inputs, stray = _split(reward, target.__call__, method=True)
    wrong, options = _split(reward, target)
    if stray or wrong:
        names = [*stray, *(argument.name for argument in wrong)]
        raise RewardError(
            "argument_misplaced",
            f"reward '{reward}' ({place(target)}): {', '.join(names)} in the wrong place; __init__ takes the options "
            "(after a *), __call__ the inputs (no * there)",
            reward=reward,
            arguments=names,
        )
    return Signature(inputs, options)


def place(target: object) -> str:
    """Returns the module and qualified name of a function or class, for messages."""
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def is_async(function: Callable[..., Any]) -> bool:
    """Checks whether a call returns an awaitable: `async def`, also under decorators, partial or as `__call__`."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _split(
    reward: str, target: Callable[..., Any], *, method: bool = False
) -> tuple[tuple[Argument, ...], dict[str, Option]]:
    """Splits arguments into inputs and options. `method`: skips the first argument, self."""
    try:
        parameters = [*inspect.signature(target).parameters.values()][int(method) :]
    except (TypeError, ValueError) as error:
        raise RewardError(
            "signature_unreadable",
            f"reward '{reward}' ({place(target)}): {error}; wrap it in a function",
            reward=reward,
        ) from error
    inputs: list[Argument] = []
    options: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            options.append(parameter)
        elif parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            inputs.append(Argument(parameter.name, parameter.default is not parameter.empty))
        else:
            what = f"{parameter.replace(annotation=parameter.empty)} ({parameter.kind.description})"
            raise RewardError(
                "argument_without_name",
                f"reward '{reward}' ({place(target)}) takes {what}; name the inputs that it needs, each is passed by "
                "its name. (A TRL reward function runs as it is: type: trl:<module or file.py>:<function>)",
                reward=reward,
                argument=parameter.name,
            )
    types = _types(reward, target, options)
    return tuple(inputs), {option.name: Option(types[option.name], option.default) for option in options}


def _types(reward: str, target: Callable[..., Any], options: list[inspect.Parameter]) -> dict[str, TypeAdapter[Any]]:
    """Returns the types of the options. Ignores inputs, whose annotations may exist only for a type checker."""
    declared = {option.name: option.annotation for option in options if option.annotation is not option.empty}
    bare = target
    while isinstance(bare, partial):
        bare = bare.func
    bare = bare.__init__ if inspect.isclass(bare) else inspect.unwrap(bare)
    names = getattr(bare, "__globals__", {})
    try:
        hints = typing.get_type_hints(SimpleNamespace(__annotations__=declared), globalns=names, include_extras=True)
        return {option.name: TypeAdapter(hints.get(option.name, Any)) for option in options}
    except (NameError, TypeError, PydanticUserError) as error:
        raise RewardError(
            "annotation_unreadable",
            f"reward '{reward}' ({place(target)}): an option's annotation cannot be read: {error}",
            reward=reward,
        ) from error
