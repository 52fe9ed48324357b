"""Settings: a service reads them once at start, validates and freezes them, and passes them in.

A value comes from the first source that has one: command line, GRISTMILL_* (URLs, directories, ids only), YAML,
default. `load_yaml` and `parse_flags` read the sources, `merge` overlays them, and `parse` validates the result.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import itertools
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from gristmill.errors import ConfigError, UnknownKeyError
from gristmill.internal.redaction import is_secret, redact, remember, remember_secrets

M = TypeVar("M", bound=BaseModel)

_PROBLEMS = {"extra_forbidden": "unknown_key"}
"""Gristmill's codes for pydantic's error types."""
_INSTANCE = re.compile(r" or instance of \w+")
"""Text that pydantic adds for callers in Python. A configuration file cannot hold an instance."""
_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<plain>:plain)?(?::-(?P<default>[^}]*))?\})")
"""${VAR}, ${VAR:-default}, ${VAR:plain}, ${VAR:plain:-default} and $$."""


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


Assignment = tuple[tuple[str | int, ...], Any]
"""The place of a setting, and its value. A number is a place in a list of sections."""


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


class _TwiceError(ValueError):
    """A key, the line in which it is set again, and the line in which it was set first."""

    def __str__(self) -> str:
        key, line, first = self.args
        return f"line {line}: '{key}' is set again (first in line {first}); keep one of them"


class _OneOfEachKey(yaml.SafeLoader):
    """Refuses a mapping with the same key twice. YAML forbids it; PyYAML keeps the last value without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise _TwiceError(key.value, line, lines[key.tag, key.value])
            lines[key.tag, key.value] = line
        return node


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


def load_yaml(path: Path, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Reads a YAML mapping and replaces ${VAR} and ${VAR:-default} from `environ` (os.environ by default).

    `$$` is a plain dollar sign. The value of a variable is redacted from then on, unless the file says `${VAR:plain}`
    and the name is not a secret's name (API_KEY). Raises ConfigError for a missing file, broken YAML or an unset
    variable.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        hint = readable_by_all(path) if isinstance(error, PermissionError) else ""
        text = f"cannot read config {path}: {error.strerror}{hint}"
        raise ConfigError("config_unreadable", text, path=path) from error
    try:
        loaded = read_yaml(raw.decode("utf-8-sig"))
    except _TwiceError as twice:
        key, line, first = twice.args
        text = f"{path}, {twice}"
        raise ConfigError("duplicate_key", text, path=path, key=key, line=line, first=first) from twice
    except ValueError as error:
        raise ConfigError("invalid_yaml", f"{path} is not valid YAML: {error}", path=path) from error
    if not isinstance(loaded, dict):
        raise ConfigError("not_a_mapping", f"{path} must hold key: value pairs at its top level", path=path)
    filled = _fill(loaded, os.environ if environ is None else environ, str(path))
    assert isinstance(filled, dict)
    return filled


def read_yaml(text: str) -> Any:
    """Returns the value of a YAML text. Raises ValueError, whose text is one line, with the place of the problem.

    All keys must be text: YAML reads the keys `on` and `1` as a truth value and a number, which JSON has not as keys.
    """
    try:
        value = yaml.load(text, _OneOfEachKey)
        _check_keys(value)
    except RecursionError as error:
        raise ValueError("it contains itself, or is nested too deep") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            raise ValueError(" ".join(str(error).split())) from error
        problem = ", ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
        raise ValueError(f"line {mark.line + 1}, column {mark.column + 1}: {problem}") from error
    return value


def _check_keys(value: Any) -> None:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} is not text; put it in quotes")
        _check_keys(inner)
    for inner in value if isinstance(value, list) else ():
        _check_keys(inner)


def find_config(name: str, config_dir: Path) -> Path:
    """Returns the file that `--config NAME` means: NAME as a path if that file exists, else `config_dir`/NAME.yaml.

    Raises ConfigError with a list of the existing names.
    """
    candidates = [Path(name), *(config_dir / f"{name}{suffix}" for suffix in ("", ".yaml", ".yml"))]
    for candidate in candidates:
        try:
            if candidate.is_file():
                return candidate
        except PermissionError as error:  # of a folder above the file
            text = f"cannot read config {candidate}: {error.strerror}{readable_by_all(candidate)}"
            raise ConfigError("config_unreadable", text, path=candidate) from error
    names = sorted(path.stem for path in config_dir.glob("*.y*ml")) if config_dir.is_dir() else []
    existing = ", ".join(names) if names else "none"
    hint = did_you_mean(name, names)
    raise ConfigError(
        "config_missing",
        f"no config '{name}': it is neither a file nor a name in {config_dir}/ (there: {existing}).{hint}",
        name=name,
    )


def readable_by_all(path: Path) -> str:
    """Returns the remedy for a file that may not be read: "chmod -R a+rX" with the closed folder above it, or the file.

    The services of the stack run as a user of the container (10001). This user does not own mounted files.
    """
    path = path.absolute()
    closed = path
    for above in reversed([path, *path.parents]):
        wanted = os.R_OK | os.X_OK if above.is_dir() else os.R_OK
        if not os.access(above, wanted, effective_ids=True):
            closed = above
            break
    return f"; make it readable, also for the container's user 10001: chmod -R a+rX {closed}"


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Overlays `low` with `high`. Mappings merge by key; other values, such as lists, are replaced."""
    merged = dict(low)
    for key, value in high.items():
        under = merged.get(key)
        merged[key] = merge(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


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


def parse_flags(arguments: Sequence[str], model: type[BaseModel], prog: str, description: str = "") -> dict[str, Any]:
    """Reads `--group_size 4`, `--group-size 4`, `--use_wandb`, `--no-use_wandb`, `--reward_functions length format`.

    Returns only the given values, nested as in `model`: `--split x` becomes {"dataset": {"split": "x"}}. If a setting
    is a list of sections, its flags set the first section, unless they have sections.
    Values stay strings, which the model converts. Raises
    ConfigError for an unknown flag, with its nearest match.
    """
    return assigned({}, parse_flag_sets(arguments, {"settings": model}, prog, description)[0], model)


def parse_flag_sets(
    arguments: Sequence[str], models: Mapping[str, type[BaseModel]], prog: str, description: str = ""
) -> list[list[Assignment]]:
    """Reads the flags of several models from one command line, as `parse_flags` does. Returns the assignments of each.

    `models`: the models by the title of their flags in `--help`. Raises ValueError if two models have the same flag.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [flags]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    flags: dict[str, tuple[int, _Flag]] = {}
    for number, (title, model) in enumerate(models.items()):
        group = parser.add_argument_group(title)
        flags_of_model = {flag.name: flag for flag in _flags(model, ())}
        if twice := flags.keys() & flags_of_model.keys():
            raise ValueError(f"{title} of {prog}: the flag --{min(twice)} is taken")
        for flag in flags_of_model.values():
            _add(group, flag)
        flags |= {name: (number, flag) for name, flag in flags_of_model.items()}
    try:
        parsed, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError("invalid_flag", f"command line: {error}") from error
    for word in unknown:
        name = word.lstrip("-").split("=")[0].replace("-", "_")
        hint = did_you_mean(name, flags)
        shown = word.split("=")[0] if word.startswith("-") else word
        if word.startswith("-"):
            raise ConfigError("unknown_flag", f"command line: unknown flag '{shown}'.{hint}", name=shown)
        raise ConfigError("unknown_argument", f"command line: unknown argument '{shown}'.{hint}", name=shown)
    given: list[list[Assignment]] = [[] for _ in models]
    for name, value in vars(parsed).items():
        number, flag = flags[name]
        given[number].append((flag.path, value))
    return given


def flag_names(model: type[BaseModel]) -> dict[str, str]:
    """Returns the flag of every setting that has a flag, by the setting's place: {"dataset.split": "--split"}.

    If a setting is a list of sections, its flags belong to the first: {"server_configs.base_url": "--base_url"}.
    """
    return {
        ".".join(part for part in flag.path if isinstance(part, str)): f"--{flag.name}" for flag in _flags(model, ())
    }


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
            if match["plain"] is None or is_secret(name):
                remember(environ[name])
            return environ[name]
        if default is None:
            raise ConfigError(
                "variable_unset",
                f"{where}: ${{{name}}} is not set; export {name} (for Compose, see docs/configuration.md), or give a "
                f"default: ${{{name}:-value}}",
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


@dataclass(frozen=True)
class _Flag:
    path: tuple[str | int, ...]
    field: FieldInfo

    @property
    def name(self) -> str:
        return str(self.path[-1])


def _flags(model: type[BaseModel], prefix: tuple[str | int, ...]) -> list[_Flag]:
    flags: list[_Flag] = []
    for name, field in model.model_fields.items():
        section = inner_model(field.annotation)
        if section is None:
            if not is_mapping(field.annotation):
                flags.append(_Flag((*prefix, name), field))
        elif typing.get_origin(field.annotation) is list and only_models(field.annotation):
            # A list such as `sources` repeats the sections of the run, whose flags would be taken.
            if not any(inner_model(inner.annotation) for inner in section.model_fields.values()):
                flags += _flags(section, (*prefix, name, 0))
        elif typing.get_origin(field.annotation) is list:
            flags.append(_Flag((*prefix, name), field))
        else:
            flags += _flags(section, (*prefix, name))
    return flags


def _add(parser: argparse._ArgumentGroup, flag: _Flag) -> None:
    spellings = dict.fromkeys([f"--{flag.name}", f"--{flag.name.replace('_', '-')}"])
    help_text = (flag.field.description or "").replace("%", "%%")
    kinds = _kinds(flag.field.annotation)
    words = [str(word) for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
    if bool in kinds:
        parser.add_argument(
            *spellings,
            dest=flag.name,
            nargs="?",
            const=True,
            default=argparse.SUPPRESS,
            metavar="|".join(["BOOL", *words]),
            help=help_text,
        )
        negated = dict.fromkeys([f"--no_{flag.name}", f"--no-{flag.name}", f"--no-{flag.name.replace('_', '-')}"])
        parser.add_argument(
            *negated,
            dest=flag.name,
            action="store_const",
            const=False,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    elif typing.get_origin(flag.field.annotation) is list:
        parser.add_argument(*spellings, dest=flag.name, nargs="+", default=argparse.SUPPRESS, help=help_text)
    else:
        metavar = "|".join(words) or "VALUE"
        parser.add_argument(*spellings, dest=flag.name, default=argparse.SUPPRESS, metavar=metavar, help=help_text)


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


def _kinds(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def is_mapping(annotation: Any) -> bool:
    """Returns whether a setting is a mapping with free keys."""
    return any(typing.get_origin(kind) is dict or kind is dict for kind in _kinds(annotation))


def only_models(annotation: Any) -> bool:
    """Returns whether each type in a list's annotation is a settings model."""
    return all(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in typing.get_args(annotation))
