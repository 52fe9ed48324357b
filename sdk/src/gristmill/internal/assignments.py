"""Assignments: values with their places in the settings, such as those of `--set KEY=VALUE` on the command line."""

from __future__ import annotations

import copy
import itertools
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from gristmill.errors import ConfigError, UnknownKeyError
from gristmill.internal.config_files import read_yaml
from gristmill.internal.settings import Settings, did_you_mean, inner_model, is_mapping, only_models

Assignment = tuple[tuple[str | int, ...], Any]
"""The place of a setting, and its value. A number is a place in a list of sections."""

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


def assigned(values: Mapping[str, Any], assignments: Iterable[Assignment], model: type[BaseModel]) -> dict[str, Any]:
    """Returns a copy of `values`, nested as in `model`, with the value of each assignment in its place, in their order.

    Missing sections on the way are made. A number may be the first after a list's end. Raises ConfigError for a number
    beyond it, and if another value is in the place of a section.
    """
    changed = copy.deepcopy(dict(values))
    for path, value in assignments:
        if not put(changed, path, value, model):
            key = ".".join(map(str, path))
            text = f"command line: {key} cannot be set: a part of it is not a section, or its number is beyond the list"
            raise ConfigError("invalid_flag", text, flag="--set", value=key)
    return changed


def by_place(assignments: Iterable[Assignment]) -> dict[str, Any]:
    """Returns the values of assignments in mappings, with a number as a key too."""
    tree: dict[Any, Any] = {}
    for path, value in assignments:
        here = tree
        for part in path[:-1]:
            inner = here.get(part)
            here[part] = here = dict(inner) if isinstance(inner, Mapping) else {}
        here[path[-1]] = value
    return tree


def put(values: dict[str, Any], path: Sequence[str | int], value: Any, model: type[BaseModel] | None = None) -> bool:
    """Sets a value at its place, and makes the sections that lead there. `model`: of `values`, to read short forms.

    Returns False if another value is in the place of a section, or if a number is beyond the end of a list.
    """
    here: Any = values
    for part, following in itertools.pairwise([*path, None]):
        if isinstance(part, int):
            if not isinstance(here, list) or part > len(here):
                return False
            here += [{}] * (part == len(here))
        elif not isinstance(here, dict):
            return False
        elif model is not None:
            model = inner_model(model.model_fields[part].annotation) if part in model.model_fields else None
        if following is None:
            here[part] = value
            continue
        inner = here[part] if isinstance(part, int) else here.get(part)
        if inner is None:
            inner = [] if isinstance(following, int) else {}
        elif isinstance(following, str) and model is not None and issubclass(model, Settings):
            inner = model.in_full(inner)
        here[part] = here = inner
    return True
