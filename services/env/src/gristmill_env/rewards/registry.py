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
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter
from pathlib import Path
from typing import Any, TypeVar

from gristmill.internal.plugins import import_error
from gristmill.internal.settings import did_you_mean
from gristmill_env.errors import RewardError
from gristmill_env.options import Option, checked_options, typed_options
from gristmill_env.values import message_of

ENTRY_POINTS = "gristmill.rewards"
"""Entry point group with which a package provides rewards."""

ExtractAnswer = Callable[..., str | None]
"""Returns the answer of a completion in canonical form. Arguments: the completion, its row, and the reward's options by
name."""
_LEGACY = "_reward"
"""Suffix of reward names in Atropos configurations: accuracy_reward is accuracy."""

_Target = TypeVar("_Target", bound=Callable[..., Any])


@dataclass(frozen=True)
class Definition:
    """A reward function or class, with its inputs and options."""

    name: str
    target: Callable[..., Any]
    inputs: tuple[Parameter, ...]
    """The arguments that are filled by their names. An argument with a default may be missing in a run."""
    options: Mapping[str, Option]
    extract_answer: ExtractAnswer | None = None

    @classmethod
    def of(cls, name: str, target: Callable[..., Any], extract_answer: ExtractAnswer | None = None) -> Definition:
        """Reads the target's signature. Raises RewardError when the target cannot be a reward."""
        return cls(name, target, *_signature(name, target), extract_answer)

    def build(
        self, params: Mapping[str, Any], *, later: bool = False
    ) -> tuple[Callable[..., Any], ExtractAnswer | None]:
        """Returns the function that scores inputs, and the function that extracts the answer. Both have their options.

        `later`: returns a `Later` in place of an instance of a class. Raises RewardError for invalid params.
        """
        options = checked_options(params, self.options, f"reward '{self.name}'", RewardError, reward=self.name)
        extract = self.extract_answer
        if extract is not None and options:
            extract = partial(extract, **options)
        if not inspect.isclass(self.target):
            return partial(self.target, **options) if options else self.target, extract
        made = Later(self.target, partial(self._instance, options))
        return made if later else made.instance(), extract

    def _instance(self, options: Mapping[str, Any]) -> Any:
        try:
            return self.target(**options)
        except RewardError:
            raise
        except Exception as error:  # the user's __init__
            kind = type(error).__name__
            reason = f"reward '{self.name}' cannot be made with these params: {kind}: {message_of(error)}"
            raise RewardError("reward_not_made", reason, reward=self.name, error=kind) from error


@dataclass(frozen=True)
class Later:
    """An instance of a reward's class that another process makes: it may hold a model."""

    target: Callable[..., Any]
    """The class."""
    instance: Callable[[], Any]
    """Makes the instance. Raises RewardError."""

    def __call__(self) -> None:
        """Raises TypeError, because only the instance is called."""
        raise TypeError("the instance is not made in this process")


_REGISTRY: dict[str, Definition] = {}


def reward(name: str, *, extract_answer: ExtractAnswer | None = None) -> Callable[[_Target], _Target]:
    """Registers the decorated function or class as the reward `name`.

    `extract_answer`: for a reward that extracts an answer from the completion. extract_answer(completion, row,
    **options) returns the extracted answer in canonical form, or None. Evaluations use this form to count votes.

    Raises RewardError when the name is taken, or the signature cannot be filled. The same definition may run again, as
    in a notebook, and replaces the earlier definition.
    """

    def register(target: _Target) -> _Target:
        definition = Definition.of(name, target, extract_answer)
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
    names = reward_names()
    raise RewardError(
        "unknown_reward",
        f"no reward '{name}' is registered; there are {', '.join(names)}.{did_you_mean(name, names)}",
        reward=name,
        known=names,
    )


def is_offered(name: str) -> bool:
    """Returns whether an installed package provides the reward `name`, so that any process can find it."""
    return not {name, name.removesuffix(_LEGACY)}.isdisjoint(_offered())


def registered(target: object) -> Definition | None:
    """Returns the definition that the decorator registered for this function or class, if any."""
    return next((definition for definition in _REGISTRY.values() if definition.target is target), None)


def _offered() -> dict[str, EntryPoint]:
    # Reading the metadata of every installed package takes long, and each reward asks.
    folders = [Path(folder) for folder in sys.path]
    return _offered_in(*((folder, folder.stat().st_mtime_ns) for folder in folders if folder.is_dir()))


@lru_cache(maxsize=1)
def _offered_in(*_folders: tuple[Path, int]) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _load(entry: EntryPoint) -> Definition:
    where = f"entry point '{entry.name}' ({entry.value}, group {ENTRY_POINTS})"
    try:
        target = entry.load()
    except (Exception, SystemExit) as error:
        failed = import_error(where, error)
        raise RewardError(failed.code, str(failed), **failed.values) from error
    if entry.name not in _REGISTRY:  # the target's decorator may have registered the reward
        if not callable(target):
            raise RewardError(
                "reward_not_callable",
                f"{where} is a {type(target).__name__}, not a function or a class",
                reward=entry.name,
            )
        _REGISTRY[entry.name] = Definition.of(entry.name, target)
    return _REGISTRY[entry.name]


def _signature(reward: str, target: Callable[..., Any]) -> tuple[tuple[Parameter, ...], dict[str, Option]]:
    """Returns the inputs and the options of a function, a class, or another callable.

    Raises RewardError for arguments that cannot be filled by name: *args, **kwargs, positional-only arguments. Also
    raises RewardError for options in the wrong place, and for an option's annotation that cannot be read.
    """
    if not inspect.isclass(target):
        return _split(reward, target)
    if not any("__call__" in vars(base) for base in target.__mro__):
        raise RewardError(
            "reward_not_callable",
            f"reward '{reward}' is a class ({place(target)}) without __call__; its inputs belong there",
            reward=reward,
        )
    inputs, stray = _split(reward, target.__call__, method=True)
    wrong, options = _split(reward, target)
    if stray or wrong:
        names = [*stray, *(argument.name for argument in wrong)]
        raise RewardError(
            "argument_misplaced",
            f"reward '{reward}' ({place(target)}): {', '.join(names)} in the wrong place; __init__ takes the options "
            "(after a *), __call__ the inputs (no * there)",
            reward=reward,
            arguments=names,
        )
    return inputs, options


def place(target: object) -> str:
    """Returns the module and qualified name of a function or class, for messages."""
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def _split(
    reward: str, target: Callable[..., Any], *, method: bool = False
) -> tuple[tuple[Parameter, ...], dict[str, Option]]:
    """Splits arguments into inputs and options. `method`: skips the first argument, self."""
    try:
        parameters = [*inspect.signature(target).parameters.values()][int(method) :]
    except (TypeError, ValueError) as error:
        raise RewardError(
            "signature_unreadable",
            f"reward '{reward}' ({place(target)}): {error}; wrap it in a function",
            reward=reward,
        ) from error
    inputs: list[Parameter] = []
    options: list[Parameter] = []
    for parameter in parameters:
        if parameter.kind is Parameter.KEYWORD_ONLY:
            options.append(parameter)
        elif parameter.kind is Parameter.POSITIONAL_OR_KEYWORD:
            inputs.append(parameter)
        else:
            what = f"{parameter.replace(annotation=parameter.empty)} ({parameter.kind.description})"
            raise RewardError(
                "argument_without_name",
                f"reward '{reward}' ({place(target)}) takes {what}; name the inputs that it needs, each is passed by "
                "its name. (A TRL reward function runs as it is: type: trl:<module or file.py>:<function>)",
                reward=reward,
                argument=parameter.name,
            )
    where = f"reward '{reward}' ({place(target)})"
    return tuple(inputs), typed_options(target, options, where, RewardError, reward=reward)
