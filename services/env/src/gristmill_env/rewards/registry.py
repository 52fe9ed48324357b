"""Rewards by name.

A reward is a function. What it takes by position it is given, by name, from the `Sample`
(`completion`, `answer`, `tokens`, ...): it declares only what it needs. Its keyword-only
arguments are its options, which a configuration sets under `params`; their annotations are checked.
It returns a score, or None for "nothing to say". What it raises is an error, never a score::

    @reward("ends_well")
    def ends_well(completion: str, *, mark: str = ".") -> float:
        return float(completion.endswith(mark))
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gristmill.settings.nearest import did_you_mean
from gristmill_env.errors import RewardError
from gristmill_env.rewards.sample import INPUTS, Sample

RewardFunction = Callable[..., float | None]


@dataclass(frozen=True)
class RegisteredReward:
    """A reward function and what its signature says."""

    name: str
    function: RewardFunction
    inputs: tuple[str, ...]
    """Fields of `Sample` that it takes."""
    options: Mapping[str, TypeAdapter[Any]]
    """Its options and their types."""


@dataclass(frozen=True)
class Reward:
    """A reward with its options set, ready to score."""

    name: str
    inputs: tuple[str, ...]
    function: RewardFunction

    @property
    def needs_answer(self) -> bool:
        """Whether it compares with the row's answer."""
        return "answer" in self.inputs

    def score(self, sample: Sample) -> float | None:
        """The reward of one completion; raises whatever the reward raises."""
        return self.function(**{name: getattr(sample, name) for name in self.inputs})


_REGISTRY: dict[str, RegisteredReward] = {}


def reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Register the decorated function as the reward `name`.

    Raises RewardError when the name is taken, or an argument is nothing that a `Sample` has.
    """

    def register(function: RewardFunction) -> RewardFunction:
        if name in _REGISTRY:
            there = _place(_REGISTRY[name].function)
            raise RewardError(f"reward '{name}' is registered twice: by {there} and by {_place(function)}; rename one")
        hints = typing.get_type_hints(function, include_extras=True)
        inputs, options = [], {}
        for argument in inspect.signature(function).parameters.values():
            if argument.kind is inspect.Parameter.KEYWORD_ONLY:
                options[argument.name] = TypeAdapter(hints.get(argument.name, Any))
            elif argument.name in INPUTS:
                inputs.append(argument.name)
            else:
                raise RewardError(
                    f"reward '{name}' ({_place(function)}) asks for '{argument.name}'; a sample has "
                    f"{', '.join(INPUTS)} (an option comes after a *).{did_you_mean(argument.name, INPUTS)}"
                )
        _REGISTRY[name] = RegisteredReward(name, function, tuple(inputs), options)
        return function

    return register


def reward_names() -> list[str]:
    """Names of all registered rewards."""
    return sorted(_REGISTRY)


def create_reward(name: str, params: Mapping[str, Any] | None = None) -> Reward:
    """The reward `name` with its options set to `params`.

    Raises RewardError for a name or an option that does not exist (all that do are listed, and the
    nearest), and for an option's value of another type.
    """
    if name not in _REGISTRY:
        names = reward_names()
        raise RewardError(f"no reward '{name}' is registered; there are {', '.join(names)}.{did_you_mean(name, names)}")
    entry, options = _REGISTRY[name], {}
    for key, value in (params or {}).items():
        if key not in entry.options:
            has = ", ".join(entry.options) or "none"
            raise RewardError(
                f"reward '{name}' has no parameter '{key}'; it has {has}.{did_you_mean(key, entry.options)}"
            )
        try:
            options[key] = entry.options[key].validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise RewardError(f"parameter '{key}' of reward '{name}': {reason} (found {value!r})") from error
    return Reward(name, entry.inputs, partial(entry.function, **options))


def _place(function: RewardFunction) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"
