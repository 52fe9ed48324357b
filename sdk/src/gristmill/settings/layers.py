"""Layers of settings: read from files, merged from low to high, then validated as one."""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from gristmill.errors import ConfigError, UnknownKeyError
from gristmill.redaction import is_secret, redact, remember, remember_secrets
from gristmill.settings.nearest import did_you_mean

M = TypeVar("M", bound=BaseModel)

_PROBLEMS = {"extra_forbidden": "unknown_key"}
"""Gristmill's codes for pydantic's error types."""
_INSTANCE = re.compile(r" or instance of \w+")
"""Text that pydantic adds for callers in Python. A configuration file cannot hold an instance."""
_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})")
"""${VAR}, ${VAR:-default} and $$."""


class Settings(BaseModel):
    """Frozen; an unknown key is an error; the string under a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


def find_config(name: str, config_dir: Path) -> Path:
    """Returns the file that `--config NAME` means: NAME as a path if that file exists, else `config_dir`/NAME.yaml.

    Raises ConfigError with a list of the existing names.
    """
    path = Path(name)
    if path.is_file():
        return path
    for suffix in ("", ".yaml", ".yml"):
        candidate = config_dir / f"{name}{suffix}"
        if candidate.is_file():
            return candidate
    names = sorted(path.stem for path in config_dir.glob("*.y*ml")) if config_dir.is_dir() else []
    there = ", ".join(names) if names else "none"
    hint = did_you_mean(name, names)
    raise ConfigError(
        "config_missing",
        f"no config '{name}': it is neither a file nor a name in {config_dir}/ (there: {there}).{hint}",
        name=name,
    )


def load_yaml(path: Path, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Reads a YAML mapping and replaces ${VAR} and ${VAR:-default} from `environ` (os.environ by default).

    `$$` is a plain dollar sign. The value of a variable with a secret's name (API_KEY) is redacted from then on. Raises
    ConfigError for a missing file, broken YAML or an unset variable.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError("config_unreadable", f"cannot read config {path}: {error.strerror}", path=path) from error
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError("invalid_yaml", f"{path} is not valid YAML: {error}", path=path) from error
    if not isinstance(loaded, dict):
        raise ConfigError("not_a_mapping", f"{path} must hold key: value pairs at its top level", path=path)
    filled = _fill(loaded, os.environ if environ is None else environ, str(path))
    assert isinstance(filled, dict)
    return filled


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Overlays `low` with `high`. Mappings merge by key, lists of mappings by position; other values are replaced."""
    merged = dict(low)
    for key, value in high.items():
        under = merged.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(under, value)
        elif _mappings(under) and _mappings(value):
            pairs = zip(under, value, strict=False)
            longer = value if len(value) > len(under) else under
            merged[key] = [merge(a, b) for a, b in pairs] + list(longer[min(len(under), len(value)) :])
        else:
            merged[key] = value
    return merged


def parse(model: type[M], values: Mapping[str, Any], where: str) -> M:
    """Validates `values` as `model`. Secrets in `values` are redacted from then on.

    Raises ConfigError with one line for every wrong key. Each line names `where`, the source of the values.
    """
    remember_secrets(values)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = _as_written(error, values)
        lines = [_explain(model, item, where) for item in found]
        unknown = any(item["type"] == "extra_forbidden" for item in found)
        problems = {_key(item): _PROBLEMS.get(item["type"], item["type"]) for item in found}
        message = "\n".join(dict.fromkeys(lines))
        if unknown:
            raise UnknownKeyError("unknown_key", message, where=where, problems=problems) from error
        raise ConfigError("invalid_settings", message, where=where, problems=problems) from error


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """Returns the settings model inside `Model`, `Model | None` or `list[Model]`, or None for other annotations."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    origin = typing.get_origin(annotation)
    if origin in (list, tuple, typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            found = inner_model(argument)
            if found is not None:
                return found
    return None


def _fill(value: Any, environ: Mapping[str, str], where: str) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item, environ, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, environ, where) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if name is None:
            return "$"
        # As in a shell, ":-" also replaces a variable that is set but empty.
        if environ.get(name) or (name in environ and default is None):
            if is_secret(name):
                remember(environ[name])
            return environ[name]
        if default is None:
            raise ConfigError(
                "variable_unset",
                f"{where}: ${{{name}}} is not set; export {name}, or give a default: ${{{name}:-value}}",
                where=where,
                variable=name,
            )
        return default

    return _VARIABLE.sub(replace, value)


def _as_written(error: ValidationError, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the errors with the keys of the user's settings as their locations.

    For a setting with several possible types, pydantic reports the errors of each type. The location then contains the
    type's name: dataset.reward_functions.0.str. This function removes the type's name. It also drops the error "not of
    that type" if the value has another of the types and errors inside.
    """
    found: list[dict[str, Any]] = [
        {**item, "loc": _keys(dict(item), values), "typed": item["loc"]} for item in error.errors()
    ]
    inside = {item["loc"][:depth] for item in found for depth in range(len(item["loc"]))}
    return [item for item in found if item["loc"] == item["typed"] or item["loc"] not in inside]


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
        known = _fields_at(model, location[:-1])
        hint = did_you_mean(str(location[-1]), known)
        return f"{where}: unknown key '{key}'.{hint or ' Known here: ' + ', '.join(known) + '.'}"
    if error["type"] == "missing":
        return f"{where}: '{key}' is missing; it is required."
    written = error["type"] == "value_error" or "url" not in error  # Gristmill wrote the sentence
    message = _INSTANCE.sub("", error["msg"]).removeprefix("Value error, ")
    found = redact(error["input"], str(location[-1]) if location else "")
    return f"{where}: '{key}': {message}" + ("" if written else f" (found {found!r}).")


def _key(error: Mapping[str, Any]) -> str:
    return ".".join(str(part) for part in error["loc"]) or "settings"


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    here = model
    for part in location:
        if isinstance(part, str) and part in here.model_fields:
            inner = inner_model(here.model_fields[part].annotation)
            here = inner if inner is not None else here
    return sorted(here.model_fields)


def _mappings(value: Any) -> typing.TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
