"""Rewards of Atropos' files: their names, their options, and the forms they are written in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill import ConfigError

WEIGHT_SUFFIX = "_reward_weight"


@dataclass(frozen=True)
class RewardName:
    """One reward of Atropos."""

    name: str
    here: str | None
    """Our name; None: it does not ship here."""
    text: str = ""


@dataclass(frozen=True)
class RewardOption:
    """One option of a reward, beside those that mean the same here."""

    reward: str
    """"" stands for every reward."""
    name: str
    here: str | None
    """Our option; None: it has no effect, of which a warning tells."""
    text: str
    quiet: tuple[Any, ...] = ()
    """Values of which no warning need tell."""


REWARDS = (
    RewardName("accuracy", "accuracy"),
    RewardName("format", "format"),
    RewardName("r1", "r1"),
    RewardName("cosine_scaled", "cosine_scaled"),
    RewardName("reasoning_steps", "reasoning_steps"),
    RewardName("repetition_penalty", "repetition_penalty"),
    RewardName("cascading_r1_math", "cascading_r1"),
    RewardName("combined", "combined"),
    RewardName("length", "length", "Atropos' guide uses it, but ships none"),
    RewardName("crossword_format", None, "made for one kind of puzzle"),
    RewardName("chandas_meter", None, "made for one kind of verse"),
)

OPTIONS = (
    RewardOption("", "name", None, "a reward's figures go by its type"),
    RewardOption("accuracy", "split_on_think_tag", None, "what stands before </think> is never read", (True,)),
    RewardOption("accuracy", "tolerance", None, "numbers are compared exactly, then symbolically"),
    RewardOption("accuracy", "max_boxed_threshold", None, "the last \\boxed{} counts, however many there are"),
    RewardOption("format", "case_sensitive", None, "tags are written in small letters", (False,)),
    RewardOption("reasoning_steps", "min_words", None, "markers of steps are counted, no words"),
    RewardOption("reasoning_steps", "base_score", None, "the score is min(1, markers / min_steps)"),
    RewardOption("reasoning_steps", "pattern_weights", None, "all markers count alike"),
    RewardOption("repetition_penalty", "min_words", None, "a short answer is never punished"),
    RewardOption("repetition_penalty", "min_sentences", None, "a short answer is never punished"),
    RewardOption("repetition_penalty", "short_text_penalty", None, "a short answer is never punished"),
    RewardOption("repetition_penalty", "paragraph_repetition_base_penalty", None, "n-grams are counted, no paragraphs"),
    RewardOption("repetition_penalty", "component_weights", None, "n-grams are counted and nothing else"),
    RewardOption("repetition_penalty", "stopwords", None, "all words count"),
    RewardOption("cosine_scaled", "scale_factor", "scale", "the score is clip(1 - scale x cosine distance)"),
    RewardOption("cosine_scaled", "default_reward", None, "a row without an answer has no score instead"),
)

_NAMES = {reward.name: reward for reward in REWARDS}
_OPTIONS = {(option.reward, option.name): option for option in OPTIONS}


def reward_list(flat: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], list[str]]:
    """`reward_functions` of a file of Atropos in our form, and what to tell the user.

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
        raise ConfigError(f"{where}: reward_functions is a list of names or of {{type, weight, params}}")
    return [_entry(item, where, notes) for item in listed]


def _entry(item: Any, where: str, notes: list[str]) -> dict[str, Any]:
    if isinstance(item, str):
        return {"type": _renamed(item, where)}
    if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
        raise ConfigError(f"{where}: reward_functions: {item!r:.60} is neither a name nor {{type, weight, params}}")
    theirs = item["type"].removesuffix("_reward")
    entry: dict[str, Any] = {"type": _renamed(item["type"], where)}
    if item.get("weight") is not None:
        entry["weight"] = item["weight"]
    # Atropos takes options in params: and beside it; those in params: stand above.
    beside = {key: value for key, value in item.items() if key not in ("type", "weight", "params")}
    params: dict[str, Any] = {}
    for name, value in {**beside, **(item.get("params") or {})}.items():
        if theirs == "combined" and name == "rewards":
            params[name] = _entries(value, where, notes)
            continue
        option = _OPTIONS.get((theirs, name)) or _OPTIONS.get(("", name))
        if option is None:
            params[name] = value
        elif option.here is not None:
            params[option.here] = value
        elif value not in option.quiet:
            notes.append(f"{name} of reward '{theirs}' has no effect: {option.text}")
    return {**entry, "params": params} if params else entry


def _renamed(name: str, where: str) -> str:
    known = _NAMES.get(name) or _NAMES.get(name.removesuffix("_reward"))
    if known is None:  # one of the user's own, or a mistyped one: the registry says which
        return name
    if known.here is None:
        raise ConfigError(
            f"{where}: reward '{name}' does not ship here: it was {known.text}. Register one of your own "
            "(file.py:function)"
        )
    return known.here
