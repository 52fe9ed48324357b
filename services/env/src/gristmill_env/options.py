"""The options of a reward or an environment, which a configuration sets under `params`."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from types import SimpleNamespace
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from gristmill.internal.redaction import redact
from gristmill.internal.settings import did_you_mean
from gristmill_env.errors import EnvError

REQUIRED = Parameter.empty
"""Marks an option without a default."""


@dataclass(frozen=True)
class Option:
    """A parameter that a configuration sets under `params`."""

    type: TypeAdapter[Any]
    default: Any
    """REQUIRED if the option has no default."""


def options_of(function: Callable[..., Any], owner: str, error: type[EnvError], **values: object) -> dict[str, Option]:
    """Returns the keyword-only parameters of a function as options. The arguments are those of `typed_options`."""
    given = inspect.signature(function).parameters.values()
    named = [parameter for parameter in given if parameter.kind is Parameter.KEYWORD_ONLY]
    return typed_options(function, named, owner, error, **values)


def typed_options(
    function: Callable[..., Any], options: Sequence[Parameter], owner: str, error: type[EnvError], **values: object
) -> dict[str, Option]:
    """Returns parameters of a function, or of a class' `__init__`, as options. Reads no other annotation, because
    others may exist only for a type checker.

    Raises `error` for an annotation that cannot be read. `owner`, `values`: as for `refuse_unknown`.
    """
    declared = {option.name: option.annotation for option in options if option.annotation is not option.empty}
    bare = function
    while isinstance(bare, partial):
        bare = bare.func
    bare = bare.__init__ if inspect.isclass(bare) else inspect.unwrap(bare)
    names = getattr(bare, "__globals__", {})
    try:
        hints = typing.get_type_hints(SimpleNamespace(__annotations__=declared), globalns=names, include_extras=True)
        return {one.name: Option(TypeAdapter(hints.get(one.name, Any)), one.default) for one in options}
    except (NameError, TypeError, PydanticUserError) as problem:
        text = f"{owner}: an option's annotation cannot be read: {problem}"
        raise error("annotation_unreadable", text, **values) from problem


def refuse_unknown(
    params: Mapping[str, Any], known: Collection[str], owner: str, error: type[EnvError], **values: object
) -> None:
    """Raises `error` if a parameter does not exist; the message lists all options and suggests the nearest.

    `owner`: "reward 'length'". `values`: more values of the error.
    """
    for key in params:
        if key not in known:
            has = ", ".join(known) or "none"
            raise error(
                "unknown_parameter",
                f"{owner} has no parameter '{key}'; it has {has}.{did_you_mean(str(key), known)}",
                parameter=key,
                known=list(known),
                **values,
            )


def checked_options(
    params: Mapping[str, Any],
    options: Mapping[str, Option],
    owner: str,
    error: type[EnvError],
    *,
    under: str = "params",
    **values: object,
) -> dict[str, Any]:
    """Returns `params` converted to the types that the options declare.

    Raises `error` if an option does not exist, has another type, or has no default and is not set.
    `owner` and `values`: as for `refuse_unknown`. `under`: the setting that holds `params`.
    """
    refuse_unknown(params, options, owner, error, **values)
    checked = {}
    for key, value in params.items():
        try:
            checked[key] = options[key].type.validate_python(value)
        except ValidationError as invalid:
            first = invalid.errors()[0]
            where = "".join(f"[{step!r}]" for step in first["loc"])
            problem = first["msg"]
            raise error(
                "parameter_invalid",
                f"parameter '{key}'{where} of {owner}: {problem} (found {redact(value, key)!r})",
                parameter=f"{key}{where}",
                problem=first["type"],
                **values,
            ) from invalid
    if missing := [key for key, option in options.items() if option.default is REQUIRED and key not in params]:
        raise error(
            "parameter_missing",
            f"{owner} needs the parameter '{missing[0]}'; set it under {under}",
            parameter=missing[0],
            **values,
        )
    return checked
