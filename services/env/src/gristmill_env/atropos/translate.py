"""Translates an Atropos file to values of our settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from gristmill import ConfigError
from gristmill.settings.layers import inner_model
from gristmill.settings.nearest import did_you_mean
from gristmill_env.atropos.keys import OPENAI_URL, OTHER_KEYS, SERVER_KEYS, Key, Part, Verdict
from gristmill_env.atropos.recognise import FORMAT, sign_of_atropos
from gristmill_env.atropos.rewards import WEIGHT_SUFFIX, reward_list
from gristmill_env.settings import DatasetConfig, EnvConfig, ServerConfig

_SECTIONS = ("generation", "env", "dataset")
"""Sections merged over the top level, from low to high priority, as Atropos merges them."""
_SERVERS = ("server_configs", "openai")
_REWARDS = ("reward_functions", "reward_funcs")
_IN_TRAINER_BLOCK = {
    "total_steps": "training_steps",
    "batch_size": "batch_size",
    "max_batches_offpolicy": "max_staleness",
}


@dataclass
class Translation:
    """A file's values in the form of our settings."""

    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """Notes for the user on keys that have less, more or no effect here. Empty for one of our files."""


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
    _rewards(read, flat, where)
    for name, value in flat.items():
        if name in _REWARDS or name.endswith(WEIGHT_SUFFIX):
            continue
        if (key := OTHER_KEYS.get(name)) is not None:
            _apply(read, read.values, key, value, name, where)
        elif not _pass_on(read, name, value):
            read.notes.append(f"'{name}' is no key of Atropos and has no effect.{did_you_mean(name, OTHER_KEYS)}")
    if flat.get("max_eval_workers") == 0:
        _apply(read, read.values, OTHER_KEYS["steps_per_eval"], 0, "max_eval_workers", where)
    _one_source(read)
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
    if not _is_setting(key.here):
        read.notes.append(f"'{shown}' has no effect: this version has no such setting")
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
            read.notes.append(f"'server_configs.{name}' is no key of Atropos and has no effect.{hint}")
    if "base_url" not in ours:
        ours["base_url"] = OPENAI_URL
        read.notes.append(f"a server has no base_url: as in Atropos that is {OPENAI_URL}")
    for key in SERVER_KEYS.values():
        if key.default is not None:
            ours.setdefault(key.name, key.default)
    return ours


def _rewards(read: Translation, flat: Mapping[str, Any], where: str) -> None:
    rewards, notes = reward_list(flat, where)
    read.notes += notes
    if rewards:
        read.values["dataset"] = {"reward_functions": rewards}


def _pass_on(read: Translation, name: str, value: Any) -> bool:
    """Takes over a key of ours, such as trainer: or seed, from an Atropos file. Returns whether the key is ours."""
    if name in EnvConfig.model_fields:
        read.values[name] = value
    elif name in DatasetConfig.model_fields:
        read.values.setdefault("dataset", {})[name] = value
    else:
        return False
    return True


def _one_source(read: Translation) -> None:
    dataset = read.values.get("dataset", {})
    if dataset.get("dataset_path") and dataset.pop("dataset_name", None) is not None:
        read.notes.append("dataset_name has no effect: dataset_path stands above it")


def _fill_in(read: Translation) -> None:
    """Fills in Atropos' defaults for keys that the file does not set, if our defaults differ."""
    filled = []
    trainer = read.values.get("trainer") or {}
    for key in OTHER_KEYS.values():
        if key.default is None or (key.name in _IN_TRAINER_BLOCK and _IN_TRAINER_BLOCK[key.name] in trainer):
            continue
        section = read.values.setdefault("dataset", {}) if key.part is Part.DATASET else read.values
        if key.name not in section:
            section[key.name] = key.default
            filled.append(f"{key.name} {key.default}")
    if filled:
        read.notes.append(f"Atropos' defaults, where the file says nothing: {', '.join(filled)}")


def _is_setting(path: str) -> bool:
    return path in set(_settings(EnvConfig))


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}"
        section = inner_model(info.annotation)
        if section is not None:
            yield from _settings(section, f"{prefix}{name}.")
