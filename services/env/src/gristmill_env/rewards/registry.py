"""Rewards by name.

A reward is a function or a class. Its arguments are filled by their names (see `inputs`), so a reward declares only the
inputs that it needs. The keyword-only arguments (of a class, of its `__init__`) are options. A configuration sets
options under `params`, and their annotations are checked. A reward returns a score, or None for no score. An exception
is an error, never a score::

    @reward("ends_well")
    def ends_well(completion: str, *, mark: str = ".") -> float:
        return float(completion.endswith(mark))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from gristmill.plugins import import_error
from gristmill.settings.nearest import did_you_mean
from gristmill_env.errors import RewardError
from gristmill_env.rewards.signature import Signature, place, read_signature
from gristmill_env.settings import VERIFIERS

ENTRY_POINTS = "gristmill.rewards"
"""Entry point group with which a package provides rewards."""

States = Callable[..., str | None]
"""Returns the answer of a completion in canonical form. Arguments: the completion, its row, and the reward's options by
name."""
_LEGACY = "_reward"
"""Suffix of reward names in Atropos configurations: accuracy_reward is accuracy."""

_Target = TypeVar("_Target", bound=Callable[..., Any])


@dataclass(frozen=True)
class Definition:
    """A reward function or class, and its signature."""

    name: str
    target: Callable[..., Any]
    signature: Signature
    states: States | None = None

    @classmethod
    def of(cls, name: str, target: Callable[..., Any], states: States | None = None) -> Definition:
        """Reads the target's signature. Raises RewardError when the target cannot be a reward."""
        return cls(name, target, read_signature(name, target), states)

    def build(self, params: Mapping[str, Any]) -> tuple[Callable[..., Any], States | None]:
        """Returns the function that scores inputs, and the function that extracts the answer. Both have their options.

        Raises RewardError for invalid params.
        """
        options = self.signature.check(self.name, params)
        states = partial(self.states, **options) if self.states is not None and options else self.states
        if not inspect.isclass(self.target):
            return partial(self.target, **options) if options else self.target, states
        try:
            instance: Any = self.target(**options)
            return instance, states
        except RewardError:
            raise
        except Exception as error:  # the user's __init__
            reason = f"reward '{self.name}' cannot be made with these params: {type(error).__name__}: {error}"
            raise RewardError("reward_not_made", reason, reward=self.name, error=type(error).__name__) from error


_REGISTRY: dict[str, Definition] = {}


def reward(name: str, *, states: States | None = None) -> Callable[[_Target], _Target]:
    """Registers the decorated function or class as the reward `name`.

    `states`: for a reward that extracts an answer from the completion. states(completion, row, **options) returns the
    extracted answer in canonical form, or None. Evaluations use this form to count votes.

    Raises RewardError when the name is taken, or the signature cannot be filled. The same definition may run again, as
    in a notebook, and replaces the earlier definition.
    """

    def register(target: _Target) -> _Target:
        definition = Definition.of(name, target, states)
        if name in _REGISTRY and (there := place(_REGISTRY[name].target)) != place(target):
            raise RewardError(
                "reward_registered_twice",
                f"reward '{name}' is registered twice: by {there} and by {place(target)}; rename one",
                reward=name,
                places=[there, place(target)],
            )
        _REGISTRY[name] = definition
        return target

    return register


def reward_names() -> list[str]:
    """Returns the names of all rewards that are registered or that an installed package provides."""
    return sorted({*_REGISTRY, *_offered()})


def find(name: str) -> Definition:
    """Returns the reward of this name. `accuracy_reward` finds `accuracy`, too.

    Raises RewardError when the reward does not exist; the message lists all rewards and suggests the nearest name. Also
    raises RewardError when the package that provides the reward cannot be imported.
    """
    for known in (name, name.removesuffix(_LEGACY)):
        if known in _REGISTRY:
            return _REGISTRY[known]
        if (entry := _offered().get(known)) is not None:
            return _load(entry)
    names = sorted([*reward_names(), VERIFIERS])
    raise RewardError(
        "unknown_reward",
        f"no reward '{name}' is registered; there are {', '.join(names)}.{did_you_mean(name, names)}",
        reward=name,
        known=names,
    )


def registered(target: object) -> Definition | None:
    """Returns the definition that the decorator registered for this function or class, if any."""
    return next((definition for definition in _REGISTRY.values() if definition.target is target), None)


def _offered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _load(entry: EntryPoint) -> Definition:
    where = f"entry point '{entry.name}' ({entry.value}, group {ENTRY_POINTS})"
    try:
        target = entry.load()
    except (Exception, SystemExit) as error:
        told = import_error(where, error)
        raise RewardError(told.code, str(told), **told.values) from error
    if entry.name not in _REGISTRY:  # the target's decorator may have registered the reward
        if not callable(target):
            raise RewardError(
                "reward_not_callable",
                f"{where} is a {type(target).__name__}, not a function or a class",
                reward=entry.name,
            )
        _REGISTRY[entry.name] = Definition.of(entry.name, target)
    return _REGISTRY[entry.name]
