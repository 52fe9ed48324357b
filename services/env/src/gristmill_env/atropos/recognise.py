"""Distinguishes Atropos' files from ours.

The two formats are similar on purpose, so only differences between them can decide. In this order:

1. `config_format: atropos` or `gristmill`, in the file or as a flag, decides.
2. A key that only our format has (`trainer:`, `run_id`, `dataset.seed`, ...) makes the file ours. If the file also has
   a mark of Atropos, an error names both, so that a mistyped key is never accepted silently.
3. A mark of Atropos makes the file an Atropos file. A key that only Atropos has is a mark: `env:`, `reward_funcs`,
   `max_generations_per_prompt`, ... A value that only Atropos has is a mark: `batch_size: -1`, `server_configs` as one
   section instead of a list. Keys of the data set at the top level without a `dataset:` section are a mark.
4. Any other file is ours. A plain Atropos file is read the same way under its own names; only its defaults differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gristmill import ConfigError
from gristmill_env.atropos.keys import OTHER_KEYS, SERVER_KEYS
from gristmill_env.atropos.rewards import WEIGHT_SUFFIX
from gristmill_env.settings import DatasetConfig, EnvConfig, ServerConfig

FORMAT = "config_format"
_FORMATS = ("atropos", "gristmill")
_FLAT = ("dataset_name", "dataset_path", "prompt_field")


def sign_of_atropos(values: Mapping[str, Any], where: str, told: Any = None) -> str | None:
    """Returns the sign, in words, that the file is an Atropos file; None for one of our files.

    `told`: the format that the command line names. Raises ConfigError when a file has keys of both kinds.
    """
    told = values.get(FORMAT) if told is None else told
    if told is not None and told not in _FORMATS:
        raise ConfigError(
            "unknown_config_format",
            f"{where}: '{FORMAT}' is {' or '.join(_FORMATS)}, not {told!r}.",
            where=where,
            known=list(_FORMATS),
        )
    if told is not None:
        return f"{FORMAT} says so" if told == "atropos" else None
    mark = next(_marks(values), None)
    if mark is None:
        return None
    ours = next(_ours(values), None)
    if ours is not None:
        raise ConfigError(
            "config_formats_mixed",
            f"{where}: {mark} as in a file of Atropos, but '{ours}' is a key of ours. Write it as "
            f"docs/from-atropos.md says, or have the whole file read as one of Atropos: {FORMAT}: atropos.",
            where=where,
            mark=mark,
            key=ours,
        )
    return mark


def _marks(values: Mapping[str, Any]) -> Iterator[str]:
    for prefix, section in _sections(values):
        for name in section:
            if name.endswith(WEIGHT_SUFFIX) or (name in OTHER_KEYS and not _is_ours(name)):
                yield f"it has '{prefix}{name}'"
            elif name in OTHER_KEYS and _unset_there(name, section[name]):
                yield f"'{prefix}{name}' is {section[name]}"
    if "dataset" not in values:
        for name in _FLAT:
            if name in values:
                yield f"'{name}' stands at its top level"
    servers = values.get("server_configs")
    if isinstance(servers, Mapping):
        yield "'server_configs' is one section and no list"
    for server in servers if isinstance(servers, list) else []:
        for name in server if isinstance(server, Mapping) else ():
            if name in SERVER_KEYS and name not in ServerConfig.model_fields:
                yield f"it has 'server_configs.{name}'"


def _ours(values: Mapping[str, Any]) -> Iterator[str]:
    for prefix, section in _sections(values):
        for name in section:
            if name not in OTHER_KEYS and name in (DatasetConfig if prefix else EnvConfig).model_fields:
                yield f"{prefix}{name}"


def _sections(values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the sections that can hold keys of both formats, each with the prefix of its keys' names."""
    yield "", values
    if isinstance(dataset := values.get("dataset"), Mapping):
        yield "dataset.", dataset


def _unset_there(name: str, value: Any) -> bool:
    """Returns whether the value is a number by which Atropos means "not set"."""
    return isinstance(value, int) and not isinstance(value, bool) and value < 0 and value in OTHER_KEYS[name].unset


def could_be_of_atropos(values: Mapping[str, Any]) -> bool:
    """Returns whether no key or value shows which of the two formats a file has."""
    return bool(values) and values.get(FORMAT) is None and next(_ours(values), None) is None


def _is_ours(name: str) -> bool:
    """Returns whether our files may have the key, too. Keys with another place here, or none, are Atropos' only."""
    return OTHER_KEYS[name].here in (name, f"dataset.{name}")
