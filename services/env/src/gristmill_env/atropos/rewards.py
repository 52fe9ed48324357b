"""Atropos' rewards: their names, their options, and the forms in which its files list them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill import ConfigError
from gristmill_env.settings import RewardSpec

WEIGHT_SUFFIX = "_reward_weight"


@dataclass(frozen=True)
class RewardName:
    """One reward of Atropos."""

    name: str
    here: str | None
    """Our name; None if the reward does not ship here."""
    text: str = ""


@dataclass(frozen=True)
class RewardOption:
    """An option that has no effect here; a warning reports it."""

    reward: str
    name: str
    text: str


REWARDS = (
    RewardName("accuracy", "accuracy", "reads marked answers; extract: anywhere reads all that Math-Verify finds"),
    RewardName("format", "format"),
    RewardName("r1", "r1"),
    RewardName(
        "cosine_scaled", "cosine_scaled", "without base_url the model runs in this process: gristmill-env[embeddings]"
    ),
    RewardName("reasoning_steps", "reasoning_steps"),
    RewardName("repetition_penalty", "repetition_penalty"),
    RewardName("cascading_r1_math", "cascading_r1"),
    RewardName("combined", "combined"),
    RewardName("length", "length", "Atropos' guide uses it, but ships none"),
    RewardName("crossword_format", None, "made for one kind of puzzle"),
    RewardName("chandas_meter", None, "made for one kind of verse"),
)

OPTIONS = (
    RewardOption("reasoning_steps", "min_words", "markers of steps are counted, no words"),
    RewardOption("reasoning_steps", "base_score", "the score is min(1, markers / min_steps)"),
    RewardOption("reasoning_steps", "pattern_weights", "all markers count alike"),
    RewardOption("repetition_penalty", "min_words", "a short answer is never punished"),
    RewardOption("repetition_penalty", "min_sentences", "a short answer is never punished"),
    RewardOption("repetition_penalty", "short_text_penalty", "a short answer is never punished"),
    RewardOption("repetition_penalty", "paragraph_repetition_base_penalty", "n-grams are counted, no paragraphs"),
    RewardOption("repetition_penalty", "component_weights", "n-grams are counted and nothing else"),
    RewardOption("repetition_penalty", "stopwords", "all words count"),
    RewardOption("cosine_scaled", "default_reward", "a row without an answer has no score instead"),
)

_NAMES = {reward.name: reward for reward in REWARDS}
_OPTIONS = {(option.reward, option.name): option for option in OPTIONS}


def reward_list(flat: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], list[str]]:
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
            why = "has a weight of its own" if any(entry.get("type") == ours for entry in entries) else "is not listed"
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
    if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
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
        if (option := _OPTIONS.get((theirs, name))) is not None:
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
    known = _NAMES.get(name) or _NAMES.get(name.removesuffix("_reward"))
    if known is None:  # one of the user's own, or a mistyped one: the registry says which
        return name
    if known.here is None:
        raise ConfigError(
            "reward_not_shipped",
            f"{where}: reward '{name}' does not ship here: it was {known.text}. Register one of your own "
            "(file.py:function)",
            where=where,
            name=name,
        )
    return known.here
