"""Flags: settings by their names alone on the command line, `--group_size 4`."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gristmill.errors import ConfigError
from gristmill.internal.assignments import Assignment, assigned
from gristmill.internal.settings import did_you_mean, inner_model, is_mapping, kinds_of, only_models


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
    kinds = kinds_of(flag.field.annotation)
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
