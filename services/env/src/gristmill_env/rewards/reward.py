"""A reward with its options set: ready to be bound to a run's columns, or used as a library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from gristmill_env.rewards.inputs import PLURALS, Known, resolve
from gristmill_env.rewards.library import score_now
from gristmill_env.rewards.plan import Branch, Combination, Node
from gristmill_env.rewards.running import Task
from gristmill_env.rewards.sample import Sample
from gristmill_env.rewards.signature import Argument, is_async


class Reward(ABC):
    """A reward, its options set. `create_reward` makes one."""

    name: str

    @property
    @abstractmethod
    def asks_for(self) -> frozenset[str]:
        """Fields of `Sample` and columns that it reads, in the singular."""

    @abstractmethod
    def bind(self, known: Known, name: str) -> Node:
        """Resolve what it asks for against what a run has; `name` is its full name there.

        Raises RewardError when it asks for what the run does not have.
        """

    @overload
    def score(self, completions: Sample) -> float | None: ...

    @overload
    def score(self, completions: Sequence[str | Sample], **inputs: Any) -> list[float | None]: ...

    def score(self, completions: Sample | Sequence[str | Sample], **inputs: Any) -> float | list[float | None] | None:
        """Score the completions of one prompt, without weights. Needs no event loop, and works where one runs.

        `inputs`: what the reward asks for, by the names of `Sample` or of columns. A list holds one item a
        completion, anything else is shared by all: `score(["#### 72", "72"], answer="#### 72")`. Instead of texts
        there may be samples; a single one gives a single value.

        Raises RewardError when the reward fails, or lacks an input.
        """
        if isinstance(completions, Sample):
            return score_now(self.bind, self.name, [completions], inputs)[0]
        return score_now(self.bind, self.name, completions, inputs)


@dataclass(frozen=True)
class FunctionReward(Reward):
    """A function, or an instance of a class with `__call__`."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Argument, ...]

    @property
    def asks_for(self) -> frozenset[str]:
        return frozenset(PLURALS.get(argument.name, argument.name) for argument in self.arguments)

    def bind(self, known: Known, name: str) -> Task:
        inputs = resolve(self.name, self.arguments, known)
        return Task(name, self.function, is_async(self.function), inputs.group_level, inputs.gather)


@dataclass(frozen=True)
class ComposedReward(Reward):
    """A reward made of others, each of which is called and shown by itself."""

    name: str
    parts: Mapping[str, Reward]
    metrics: frozenset[str]
    """Parts of weight 0."""
    combination: Combination

    @property
    def asks_for(self) -> frozenset[str]:
        return frozenset().union(*(part.asks_for for part in self.parts.values()))

    def bind(self, known: Known, name: str) -> Branch:
        parts = {short: part.bind(known, f"{name}/{short}") for short, part in self.parts.items()}
        return Branch(name, parts, self.metrics, self.combination)
