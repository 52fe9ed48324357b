"""Creates a reward from a name, a specification, a function or a class."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gristmill import ConfigError
from gristmill.errors import PluginError
from gristmill.internal.plugins import is_from_file, is_plugin, load_plugin
from gristmill.internal.settings import parse
from gristmill_env.errors import RewardError
from gristmill_env.rewards.composed import Composed, ComposedReward
from gristmill_env.rewards.registry import Definition, find, is_offered, registered
from gristmill_env.rewards.reward import CallableReward, FunctionReward, Reward, Source, is_built_in
from gristmill_env.rewards.trl import trl_reward
from gristmill_env.settings.dataset import RewardSpec

_TRL = "trl:"

RewardLike = str | Mapping[str, Any] | RewardSpec | Callable[..., Any]
"""A name or reference, a mapping {type, params, name}, a RewardSpec, a function, or a class."""


def create_reward(
    what: RewardLike, params: Mapping[str, Any] | None = None, *, name: str | None = None, folder: Path | None = None
) -> Reward:
    """Returns the reward with its options set to `params`. Ignores a weight in a specification; only runs use it.

    `name`: the reward's name in scores; by default the reward's own name. `folder`: searched for `file.py:function`
    before the working directory, usually the folder of the configuration file.

    A run calls the reward of a specification in a process, which makes the instance of a user's class. A function or a
    class is called in this process.

    Raises RewardError for a name or an option that does not exist. The message lists all names and suggests the
    nearest. Also raises RewardError for an option's value of another type, and for code that cannot be imported.
    """
    if not isinstance(what, str | Mapping | RewardSpec):
        if not callable(what):
            raise RewardError(
                "not_a_reward", f"a reward is a name, a specification, a function or a class, not {what!r:.60}"
            )
        definition = registered(what) or Definition.of(name or _own_name(what), what)
        return _made(definition, params or {}, name, folder)
    spec = _specification(what)
    elsewhere = _found_elsewhere(spec.type)
    made = _of(spec, params, name, folder, later=elsewhere is not None)
    if not isinstance(made, CallableReward):
        if spec.process:
            raise RewardError(
                "composed_in_process",
                f"reward '{made.name}' is made of others; set process: true on those, not on the whole",
                reward=made.name,
            )
        return made
    if made.is_built_in or elsewhere is None:
        return made
    spec_there = {"type": elsewhere, "params": {**spec.params, **(params or {})}, "name": made.name}
    return replace(made, source=Source(spec_there, folder, spec.process))


def _of(
    spec: RewardSpec, params: Mapping[str, Any] | None, name: str | None, folder: Path | None, *, later: bool
) -> Reward:
    """`later`: another process makes the instance of a user's class."""
    params, name = {**spec.params, **(params or {})}, name or spec.name
    if spec.type.startswith(_TRL):
        reference = spec.type.removeprefix(_TRL)
        return trl_reward(name or reference.rpartition(":")[2], _loaded(reference, folder), params)
    if is_plugin(spec.type):
        target = _loaded(spec.type, folder)
        definition = registered(target) or Definition.of(name or _own_name(target), target)
    else:
        definition = find(spec.type)
    target = definition.target
    later = later and not is_built_in(target) and not (inspect.isclass(target) and issubclass(target, Composed))
    return _made(definition, params, name, folder, later=later)


def _found_elsewhere(reward: str) -> str | None:
    """Returns the name or reference by which another process finds the reward; None if only this process knows it."""
    if is_plugin(reward) or is_offered(reward):
        return reward
    target = find(reward).target
    module, name = sys.modules.get(target.__module__), getattr(target, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not target:
        return None
    return f"{module.__file__ if is_from_file(module) else module.__name__}:{name}"


def _specification(what: str | Mapping[str, Any] | RewardSpec) -> RewardSpec:
    if isinstance(what, RewardSpec):
        return what
    if isinstance(what, str):
        return RewardSpec(type=what)
    try:
        return parse(RewardSpec, dict(what), "reward")
    except ConfigError as error:
        raise RewardError(error.code, str(error), **error.values) from error


def _loaded(reference: str, folder: Path | None) -> Callable[..., Any]:
    try:
        target = load_plugin(reference, folder)
    except PluginError as error:
        raise RewardError(error.code, f"reward '{reference}': {error}", reward=reference, **error.values) from error
    if not callable(target):
        raise RewardError(
            "reward_not_callable",
            f"reward '{reference}' is {target!r:.60}; it must be a function or a class",
            reward=reference,
        )
    loaded: Callable[..., Any] = target
    return loaded


def _own_name(target: Callable[..., Any]) -> str:
    name = getattr(target, "__name__", None) or type(target).__name__
    if name == "<lambda>":
        raise RewardError("reward_unnamed", "a lambda has no name to show in scores: create_reward(..., name='...')")
    return str(name)


def _made(
    definition: Definition, params: Mapping[str, Any], name: str | None, folder: Path | None, *, later: bool = False
) -> Reward:
    function, extract_answer = definition.build(params, later=later)
    name = name or definition.name
    if isinstance(function, Composed):
        parts: dict[str, Reward] = {}
        for spec in function.parts:
            part = create_reward(spec, folder=folder)
            if part.name in parts:
                raise RewardError(
                    "duplicate_name",
                    f"reward '{name}' has two parts '{part.name}'; give each a different name (name:)",
                    reward=name,
                    names=[part.name],
                )
            parts[part.name] = part
        metrics = frozenset(part for part, spec in zip(parts, function.parts, strict=True) if spec.weight == 0)
        return ComposedReward(name, parts, metrics, function)
    return FunctionReward(name, function, definition.inputs, extract_answer)
