"""Settings: a service reads them once at start, validates and freezes them, and passes them in.

A value comes from the first source that has one: command line, GRISTMILL_* (URLs, directories, ids only), YAML,
default. `merge` overlays the sources, and `parse` validates the result. The modules that read the sources are
config_files, flags and assignments.
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from gristmill.errors import ConfigError, UnknownKeyError
from gristmill.internal.redaction import redact, remember_secrets

M = TypeVar("M", bound=BaseModel)

_PROBLEMS = {"extra_forbidden": "unknown_key"}
"""Gristmill's codes for pydantic's error types."""
_INSTANCE = re.compile(r" or instance of \w+")
"""Text that pydantic adds for callers in Python. A configuration file cannot hold an instance."""


class Settings(BaseModel):
    """Frozen; an unknown key is an error; the string under a field is its help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @classmethod
    def in_full(cls, value: Any) -> Any:
        """Returns the mapping that a short form of this section means, such as its type alone. Others are unchanged."""
        return value

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, value: Any) -> Any:
        return cls.in_full(value)


def parse(
    model: type[M], values: Mapping[str, Any], where: str, over: Mapping[str, Mapping[str, Any]] | None = None
) -> M:
    """Validates `values` as `model`. Secrets in `values` are redacted from then on.

    Raises ConfigError with one line for every wrong key. Each line names the source of the value: `where`, or the first
    of `over` that has the key. `over`: the sources that override `where`, the strongest first; `values` has theirs.
    """
    remember_secrets(values)
    _check_characters(values, where)
    try:
        parsed = model.model_validate(values)
    except ValidationError as error:
        found = _as_written(error, values)
        lines = [_explain(model, item, _source(item["loc"], over or {}) or where) for item in found]
        unknown = any(item["type"] == "extra_forbidden" for item in found)
        problems = {_key(item): _PROBLEMS.get(item["type"], item["type"]) for item in found}
        message = "\n".join(dict.fromkeys(lines))
        if unknown:
            raise UnknownKeyError("unknown_key", message, where=where, problems=problems) from error
        raise ConfigError("invalid_settings", message, where=where, problems=problems) from error
    _check_numbers(values, where)
    return parsed


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value in mappings and lists, with its key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{number}".lstrip("."))
    else:
        yield key, value


def _check_characters(values: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for a text with half of a surrogate pair, which no file, tokenizer or request can hold."""
    for key, value in _leaves(values):
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
            text = f"{where}: {key} holds half a character (half of a surrogate pair), which is not text"
            raise ConfigError("half_character", text, where=where, key=key)


def _check_numbers(values: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for infinity and NaN, which the record of a run cannot hold."""
    for key, value in _leaves(values):
        if isinstance(value, float) and not math.isfinite(value):
            text = f"{where}: {key} is {value}, which a run's record cannot hold; write a large number, or leave it out"
            raise ConfigError("number_not_finite", text, where=where, key=key)


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Overlays `low` with `high`. Mappings merge by key; other values, such as lists, are replaced."""
    merged = dict(low)
    for key, value in high.items():
        under = merged.get(key)
        merged[key] = merge(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """Returns the settings model inside `Model`, `Model | None` or `list[Model]`, or None for other annotations."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    origin = typing.get_origin(annotation)
    if origin in (list, tuple, typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            inner = inner_model(argument)
            if inner is not None:
                return inner
    return None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" with the leading blank, or an empty string if no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def _as_written(error: ValidationError, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the errors with the keys of the user's settings as their locations.

    For a setting with several possible types, pydantic reports the errors of each type. The location then contains the
    type's name: dataset.reward_functions.0.str. This function removes the type's name. It also drops the error "not of
    that type" if the value has another of the types and errors inside.
    """
    problems: list[dict[str, Any]] = [
        {**item, "loc": _keys(dict(item), values), "typed": item["loc"]} for item in error.errors()
    ]
    inside = {item["loc"][:depth] for item in problems for depth in range(len(item["loc"]))}
    return [item for item in problems if item["loc"] == item["typed"] or item["loc"] not in inside]


def _keys(error: dict[str, Any], values: Any) -> tuple[int | str, ...]:
    """Returns the parts of the error's location that are in `values`, and the missing key if a key is missing."""
    keys: list[int | str] = []
    here: Any = values
    for part in error["loc"]:
        if (isinstance(here, Mapping) and part in here) or (
            isinstance(here, list | tuple) and part in range(len(here))
        ):
            keys.append(part)
            here = here[part]
    return (*keys, error["loc"][-1]) if error["type"] == "missing" else tuple(keys)


def _explain(model: type[BaseModel], error: dict[str, Any], where: str) -> str:
    location, key = error["loc"], _key(error)
    if error["type"] == "extra_forbidden":
        fields = _fields_at(model, location[:-1])
        hint = did_you_mean(str(location[-1]), fields)
        return f"{where}: unknown key '{key}'.{hint or ' Known here: ' + ', '.join(fields) + '.'}"
    if error["type"] == "missing":
        return f"{where}: '{key}' is missing; it is required."
    written = error["type"] == "value_error" or "url" not in error  # Gristmill wrote the sentence
    message = _INSTANCE.sub("", error["msg"]).removeprefix("Value error, ")
    redacted = redact(error["input"], str(location[-1]) if location else "")
    return f"{where}: '{key}': {message}" + ("" if written else f" (found {redacted!r}).")


def _source(location: Sequence[int | str], over: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns the first source that has a value at the location. A source may have a part of a section: it has none."""
    for name, source in over.items():
        here: Any = source
        for part in location:
            inside = part in here if isinstance(here, Mapping) else isinstance(here, list) and part in range(len(here))
            if not inside:
                break
            here = here[part]
        else:
            if not isinstance(here, Mapping):
                return name
    return None


def _key(error: Mapping[str, Any]) -> str:
    return ".".join(str(part) for part in error["loc"]) or "settings"


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    here = model
    for part in location:
        if isinstance(part, str) and part in here.model_fields:
            inner = inner_model(here.model_fields[part].annotation)
            here = inner if inner is not None else here
    return sorted(here.model_fields)


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the one type of another annotation."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def is_mapping(annotation: Any) -> bool:
    """Returns whether a setting is a mapping with free keys."""
    return any(typing.get_origin(kind) is dict or kind is dict for kind in kinds_of(annotation))


def only_models(annotation: Any) -> bool:
    """Returns whether each type in a list's annotation is a settings model."""
    return all(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in typing.get_args(annotation))
