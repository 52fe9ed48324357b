"""Reads Atropos' files: recognises their format, and translates every key to our settings.

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

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill import ConfigError
from gristmill.internal.config_files import load_yaml
from gristmill.internal.settings import did_you_mean
from gristmill_env.atropos.keys import (
    OPENAI_URL,
    OPTIONS_BY_NAME,
    OTHER_KEYS,
    REWARDS_BY_NAME,
    SERVER_KEYS,
    WEIGHT_SUFFIX,
    Key,
    Part,
    Verdict,
)
from gristmill_env.settings.dataset import DatasetConfig, RewardSpec
from gristmill_env.settings.run import TOP_LEVEL, EnvConfig
from gristmill_env.settings.servers import ServerConfig

logger = logging.getLogger(__name__)
FORMAT = "config_format"
_FORMATS = ("atropos", "gristmill")
_FLAT = ("dataset_name", "dataset_path", "prompt_field")
_SECTIONS = ("generation", "env", "dataset")
"""Sections merged over the top level, from low to high priority, as Atropos merges them."""
_SERVERS = ("server_configs", "openai")
_REWARDS = ("reward_functions", "reward_funcs")
_SECTION = re.compile(r"^--(no[-_])?(?:env|openai|dataset|server_configs)\.")


def read_file(path: Path, environ: Mapping[str, str], told: Any = None) -> dict[str, Any]:
    """Returns a configuration file's values in our form, and logs each note on the translation of an Atropos file.

    `told`: the format that the command line names. Raises ConfigError.
    """
    translation = translate(load_yaml(path, environ), str(path), told)
    for note in translation.notes:
        logger.warning("%s: %s", path, note)
    return translation.values


def without_section(word: str) -> str:
    """Returns a flag without its section: --group_size for --env.group_size, --base_url for --openai.base_url."""
    return _SECTION.sub(r"--\1", word)


@dataclass
class Translation:
    """A file's values in the form of our settings."""

    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """Notes for the user on keys that have less, more or no effect here. Empty for one of our files."""
    unset: set[str] = field(default_factory=set)
    """Keys with a value by which Atropos means "not set"."""


def translate(values: Mapping[str, Any], where: str, told: Any = None) -> Translation:
    """Returns a file's values in our form; values of one of our files stay unchanged.

    `where` names the file in messages; `told` is the format that the command line names. Raises ConfigError for a
    refused key and for a file that mixes both formats.
    """
    sign = sign_of_atropos(values, where, told)
    if sign is None:
        return Translation(dict(values))
    read = Translation({FORMAT: "atropos"}, [f"read as a file of Atropos, because {sign} (docs/from-atropos.md)"])
    flat, servers = _flattened(values, where)
    if flat.get("dataset") is not None:
        flat["dataset"] = _mapping(flat["dataset"], f"{where}: dataset")
    rewards, notes = _reward_list(flat, where)
    read.notes += notes
    if rewards:
        read.values["dataset"] = {"reward_functions": rewards}
    for name, value in flat.items():
        if name in _REWARDS or name.endswith(WEIGHT_SUFFIX):
            continue
        if (key := OTHER_KEYS.get(name)) is not None:
            _apply(read, read.values, key, value, name, where)
        elif not _pass_on(read, name, value):
            read.notes.append(f"'{name}' is not a key of Atropos and has no effect.{did_you_mean(name, OTHER_KEYS)}")
    if flat.get("max_eval_workers") == 0:
        _apply(read, read.values, OTHER_KEYS["steps_per_eval"], 0, "max_eval_workers", where)
    dataset = read.values.get("dataset", {})
    if dataset.get("dataset_path") and dataset.pop("dataset_name", None) is not None:
        read.notes.append("dataset_name has no effect: dataset_path overrides it")
    if servers:
        read.values["server_configs"] = [_server(read, server, where) for server in servers]
    _fill_in(read)
    return read


def _flattened(values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """Returns all keys without their sections, and the servers' sections."""
    flat = {name: value for name, value in values.items() if name not in (*_SECTIONS, *_SERVERS, FORMAT)}
    servers: list[Mapping[str, Any]] = []
    for name in _SECTIONS:
        if values.get(name) is not None:
            flat |= _mapping(values[name], f"{where}: {name}")
    for name in _SERVERS:
        listed = values.get(name) or []
        listed = [listed] if isinstance(listed, Mapping) else listed
        if not isinstance(listed, list):
            raise ConfigError(
                "not_a_mapping",
                f"{where}: {name} is a section or a list of sections, not {listed!r:.40}.",
                where=f"{where}: {name}",
            )
        servers += [_mapping(server, f"{where}: {name}") for server in listed]
    return flat, servers


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError("not_a_mapping", f"{where} must hold key: value pairs, not {value!r:.40}.", where=where)
    return value


def _apply(read: Translation, into: dict[str, Any], key: Key, value: Any, shown: str, where: str) -> None:
    """Puts a key's value into the settings, and adds the key's note if it has one. Raises ConfigError if refused."""
    if value is None or value in key.unset:
        read.unset.add(key.name)
        return
    if value not in key.quiet:
        if key.verdict is Verdict.REFUSED:
            raise ConfigError("key_refused", f"{where}: '{shown}' is refused: {key.text}.", where=where, key=shown)
        if key.verdict is Verdict.NO_EFFECT:
            read.notes.append(f"'{shown}' has no effect: {key.text}")
        if key.verdict is Verdict.WARNED:
            read.notes.append(f"'{shown}' is {value!r}: {key.text}")
    if key.here is None:
        return
    *sections, name = key.here.split(".")
    if sections == ["dataset"]:
        into = into.setdefault("dataset", {})
    into[name] = value


def _server(read: Translation, server: Mapping[str, Any], where: str) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for name, value in server.items():
        key = SERVER_KEYS.get(name)
        if key is not None and key.here == "tokenizer_name":
            if not read.values.get("tokenizer_name"):
                _apply(read, read.values, key, value, f"server_configs.{name}", where)
        elif key is not None:
            _apply(read, ours, key, value, f"server_configs.{name}", where)
        elif name in ServerConfig.model_fields:
            ours[name] = value
        else:
            hint = did_you_mean(name, SERVER_KEYS)
            read.notes.append(f"'server_configs.{name}' is not a key of Atropos and has no effect.{hint}")
    if "base_url" not in ours:
        ours["base_url"] = OPENAI_URL
        read.notes.append(f"a server has no base_url: as in Atropos that is {OPENAI_URL}")
    for key in SERVER_KEYS.values():
        if key.default is not None:
            ours.setdefault(key.name, key.default)
    return ours


def _pass_on(read: Translation, name: str, value: Any) -> bool:
    """Takes over a key of ours, such as trainer: or seed, from an Atropos file. Returns whether the key is ours."""
    if name in EnvConfig.model_fields:
        read.values[name] = value
    elif name in DatasetConfig.model_fields:
        read.values.setdefault("dataset", {})[name] = value
    else:
        return False
    return True


def _fill_in(read: Translation) -> None:
    """Fills in Atropos' defaults for keys that the file does not set, if our defaults differ."""
    filled = []
    trainer = read.values.get("trainer")
    trainer = trainer if isinstance(trainer, Mapping) else {}
    for key in OTHER_KEYS.values():
        if key.default is None or TOP_LEVEL.get(key.name) in trainer or key.name in read.unset:
            continue
        section = read.values.setdefault("dataset", {}) if key.part is Part.DATASET else read.values
        if key.name not in section:
            section[key.name] = key.default
            filled.append(f"{key.name} {key.default}")
    if filled:
        read.notes.append(f"Atropos' defaults, where the file says nothing: {', '.join(filled)}")


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


def could_be_of_atropos(values: Mapping[str, Any]) -> bool:
    """Returns whether no key or value shows which of the two formats a file has."""
    return bool(values) and values.get(FORMAT) is None and next(_ours(values), None) is None


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


def _is_ours(name: str) -> bool:
    """Returns whether our files may have the key, too. Keys with another place here, or none, are Atropos' only."""
    return OTHER_KEYS[name].here in (name, f"dataset.{name}")


def _reward_list(flat: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns `reward_functions` of an Atropos file in our form, and notes for the user.

    `flat`: the file's keys without their sections. Raises ConfigError for a reward that does not ship.
    """
    notes: list[str] = []
    listed = flat.get("reward_functions") or flat.get("reward_funcs") or []
    entries = _entries(listed, where, notes)
    weights = {key.removesuffix(WEIGHT_SUFFIX): value for key, value in flat.items() if key.endswith(WEIGHT_SUFFIX)}
    for name, weight in weights.items():
        ours = _renamed(name, where)
        unweighted = [entry for entry in entries if entry.get("type") == ours and "weight" not in entry]
        for entry in unweighted:
            entry["weight"] = weight
        if not unweighted:
            why = "has its own weight" if any(entry.get("type") == ours for entry in entries) else "is not listed"
            notes.append(f"{name}{WEIGHT_SUFFIX} has no effect: reward '{name}' {why}")
    return entries, notes


def _entries(listed: Any, where: str, notes: list[str]) -> list[dict[str, Any]]:
    if isinstance(listed, str):
        listed = [listed]
    if not isinstance(listed, Sequence):
        raise ConfigError(
            "not_a_list",
            f"{where}: reward_functions is a list of names or of {{type, weight, params}}",
            where=where,
            key="reward_functions",
        )
    return [_entry(item, where, notes) for item in listed]


def _entry(item: Any, where: str, notes: list[str]) -> dict[str, Any]:
    if isinstance(item, str):
        return _specified(item, where, {})
    if (
        not isinstance(item, Mapping)
        or not isinstance(item.get("type"), str)
        or not isinstance(item.get("params") or {}, Mapping)
    ):
        raise ConfigError(
            "not_a_reward",
            f"{where}: reward_functions: {item!r:.60} is neither a name nor {{type, weight, params}}",
            where=where,
            key="reward_functions",
        )
    theirs = item["type"].removesuffix("_reward")
    entry = {key: value for key, value in item.items() if key in RewardSpec.model_fields and value is not None}
    # Atropos also takes options next to type:; options in params: override them.
    beside = {key: value for key, value in item.items() if key not in RewardSpec.model_fields}
    params: dict[str, Any] = {}
    for name, value in {**beside, **(item.get("params") or {})}.items():
        if (option := OPTIONS_BY_NAME.get((theirs, name))) is not None:
            notes.append(f"{name} of reward '{theirs}' has no effect: {option.text}")
        elif theirs == "combined" and name == "rewards":
            params[name] = _entries(value, where, notes)
        else:
            params[name] = value
    return _specified(item["type"], where, {**entry, "params": params})


def _specified(name: str, where: str, entry: dict[str, Any]) -> dict[str, Any]:
    ours = _renamed(name, where)
    params = entry.pop("params", {})
    if ours == "cosine_scaled" and not params.get("base_url"):
        params = {"local": True, **params}
    return {**entry, "type": ours, **({"params": params} if params else {})}


def _renamed(name: str, where: str) -> str:
    reward = REWARDS_BY_NAME.get(name) or REWARDS_BY_NAME.get(name.removesuffix("_reward"))
    if reward is None:  # one of the user's own, or a mistyped one: the registry says which
        return name
    if reward.here is None:
        raise ConfigError(
            "reward_not_shipped",
            f"{where}: reward '{name}' does not ship here: it was {reward.text}. Register one of your own "
            "(file.py:function)",
            where=where,
            name=name,
        )
    return reward.here
