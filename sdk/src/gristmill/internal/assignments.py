"""`--set KEY=VALUE`: settings by the keys of the YAML file, on the command line."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel

from gristmill.errors import ConfigError, UnknownKeyError
from gristmill.internal.settings import Assignment, did_you_mean, inner_model, is_mapping, only_models, read_yaml

_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", re.ASCII)
"""A number such as 1e-5, which PyYAML reads as text."""


def parse_assignments(words: Sequence[str], model: type[BaseModel], also: Iterable[str] = ()) -> list[Assignment]:
    """Reads words such as `dataset.max_tokens=64`. Returns the places in the values of `model`, and the values.

    A value is YAML: a number, `true`, `[length, format]`. If a setting is a list of sections, a number in the key
    selects the section (`server_configs.1.timeout`), and a key without a number sets the first. Keys below a mapping
    are not checked here. `also`: further keys that a wrong key may have meant.

    Raises ConfigError for a word without `=` and for a value that is not YAML. Raises UnknownKeyError with the nearest
    known key.
    """
    found: list[Assignment] = []
    for word in words:
        key, value = read_assignment(word)
        path = _path(key, model)
        if path is None:
            hint = did_you_mean(key, [*_known(model), *also])
            raise UnknownKeyError(
                "unknown_key", f"--set: unknown key '{key}'.{hint}", where="--set", problems={key: "unknown_key"}
            )
        found.append((tuple(path), value))
    return found


def read_assignment(word: str) -> tuple[str, Any]:
    """Returns the key and the value of one word. Raises ConfigError like `parse_assignments`."""
    key, equals, text = word.partition("=")
    if not key or not equals:
        raise _invalid(word, "write KEY=VALUE, such as dataset.max_tokens=64")
    try:
        value = read_yaml(text)
    except ValueError as error:
        raise _invalid(word, f"the value is not valid YAML: {error}") from error
    return key, float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


def _invalid(word: str, problem: str) -> ConfigError:
    return ConfigError("invalid_flag", f"command line: --set {word}: {problem}", flag="--set", value=word)


def _path(key: str, model: type[BaseModel]) -> list[str | int] | None:
    """Returns the place of the setting `key` in the values of `model`; None if `model` has no such setting."""
    path: list[str | int] = []
    here, rest = model, key.split(".")
    while True:
        name = rest.pop(0)
        if name not in here.model_fields:
            return None
        path.append(name)
        annotation = here.model_fields[name].annotation
        if not rest:
            return path
        if is_mapping(annotation):
            return [*path, *rest] if all(rest) else None
        section = inner_model(annotation)
        if section is None or (typing.get_origin(annotation) is list and not only_models(annotation)):
            return None
        if typing.get_origin(annotation) is list:
            path.append(int(rest.pop(0)) if rest[0].isdecimal() else 0)
            if not rest:
                return path
        here = section


def _known(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Returns the keys of all settings. A setting of a section has the section's name and a dot before its own name."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        section = inner_model(field.annotation)
        nested = section is not None and (
            typing.get_origin(field.annotation) is not list or only_models(field.annotation)
        )
        names.append(prefix + name)
        if nested and section is not None:
            names += _known(section, f"{prefix}{name}.")
    return names
