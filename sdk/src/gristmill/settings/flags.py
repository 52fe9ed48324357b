"""Command-line flags made from a settings model: one flag per field, without prefixes for nested sections."""

from __future__ import annotations

import argparse
import itertools
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gristmill.errors import ConfigError
from gristmill.settings.layers import inner_model
from gristmill.settings.nearest import did_you_mean


@dataclass(frozen=True)
class _Flag:
    path: tuple[str | int, ...]
    field: FieldInfo

    @property
    def name(self) -> str:
        return str(self.path[-1])


def parse_flags(arguments: Sequence[str], model: type[BaseModel], prog: str, description: str = "") -> dict[str, Any]:
    """Reads `--group_size 4`, `--group-size 4`, `--use_wandb`, `--no-use_wandb`, `--reward_functions length format`.

    Returns only the given values, nested as in `model`: `--split x` becomes {"dataset": {"split": "x"}}. If a setting
    is a list of sections, its flags set the first section. Values stay strings, which the model converts. Raises
    ConfigError for an unknown flag, with its nearest match.
    """
    return parse_flag_sets(arguments, {"settings": model}, prog, description)[0]


def parse_flag_sets(
    arguments: Sequence[str], models: Mapping[str, type[BaseModel]], prog: str, description: str = ""
) -> list[dict[str, Any]]:
    """Reads the flags of several models from one command line, as `parse_flags` does. Returns one dict per model.

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
        own = {flag.name: flag for flag in _flags(model, ())}
        if twice := flags.keys() & own.keys():
            raise ValueError(f"{title} of {prog}: the flag --{min(twice)} is taken")
        for flag in own.values():
            _add(group, flag)
        flags |= {name: (number, flag) for name, flag in own.items()}
    try:
        known, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError("invalid_flag", f"command line: {error}") from error
    for word in unknown:
        name = word.lstrip("-").split("=")[0].replace("-", "_")
        hint = did_you_mean(name, flags)
        shown = word.split("=")[0] if word.startswith("-") else word
        if word.startswith("-"):
            raise ConfigError("unknown_flag", f"command line: unknown flag '{shown}'.{hint}", name=shown)
        raise ConfigError("unknown_argument", f"command line: unknown argument '{shown}'.{hint}", name=shown)
    values: list[dict[str, Any]] = [{} for _ in models]
    for name, value in vars(known).items():
        number, flag = flags[name]
        _set(values[number], flag.path, value)
    return values


def _flags(model: type[BaseModel], prefix: tuple[str | int, ...]) -> list[_Flag]:
    found: list[_Flag] = []
    for name, field in model.model_fields.items():
        section = inner_model(field.annotation)
        if section is None:
            if not _is_mapping(field.annotation):
                found.append(_Flag((*prefix, name), field))
        elif typing.get_origin(field.annotation) is list and _only_models(field.annotation):
            found += _flags(section, (*prefix, name, 0))
        elif typing.get_origin(field.annotation) is list:
            found.append(_Flag((*prefix, name), field))
        else:
            found += _flags(section, (*prefix, name))
    return found


def _add(parser: argparse._ArgumentGroup, flag: _Flag) -> None:
    spellings = dict.fromkeys([f"--{flag.name}", f"--{flag.name.replace('_', '-')}"])
    help_text = (flag.field.description or "").replace("%", "%%")
    kinds = _kinds(flag.field.annotation)
    if bool in kinds:
        parser.add_argument(
            *spellings, dest=flag.name, nargs="?", const=True, default=argparse.SUPPRESS, metavar="BOOL", help=help_text
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
        parser.add_argument(*spellings, dest=flag.name, default=argparse.SUPPRESS, metavar="VALUE", help=help_text)


def _set(values: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    here: Any = values
    for part, following in itertools.pairwise(path):
        if isinstance(part, int):
            here = here[part]
        else:
            here = here.setdefault(part, [{}] if isinstance(following, int) else {})
    here[path[-1]] = value


def _kinds(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _is_mapping(annotation: Any) -> bool:
    return any(typing.get_origin(kind) is dict or kind is dict for kind in _kinds(annotation))


def _only_models(annotation: Any) -> bool:
    return all(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in typing.get_args(annotation))


def flag_names(model: type[BaseModel]) -> dict[str, str]:
    """Returns the flag of every setting that has a flag, by the setting's place: {"dataset.split": "--split"}.

    If a setting is a list of sections, its flags belong to the first: {"server_configs.base_url": "--base_url"}.
    """
    return {
        ".".join(part for part in flag.path if isinstance(part, str)): f"--{flag.name}" for flag in _flags(model, ())
    }
