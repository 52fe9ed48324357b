"""A reward with its options set: ready to be bound to a run's columns, or used as a library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from gristmill_env.errors import RewardError
from gristmill_env.rewards.answers import one_form
from gristmill_env.rewards.calls import Task
from gristmill_env.rewards.extraction import final_answer
from gristmill_env.rewards.inputs import ANSWER, PLURALS, Known, resolve
from gristmill_env.rewards.library import score_now
from gristmill_env.rewards.plan import Branch, Combination, Node
from gristmill_env.rewards.registry import States
from gristmill_env.rewards.sample import Sample, private
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

    @property
    def compares(self) -> bool:
        """Whether it asks for the row's answer."""
        return not self.asks_for.isdisjoint(ANSWER)

    @property
    def reads_answers(self) -> bool:
        """Whether it says itself what a completion states; else `stated` is what anybody would take for it."""
        return False

    def stated(self, completion: str, row: Mapping[str, Any]) -> str | None:
        """The final answer of the completion, in one form for all ways to write it; None: it states none.

        Raises RewardError when the reward cannot say it.
        """
        answer = final_answer(completion)
        return None if answer is None else one_form(answer)

    def leaves(self) -> dict[str, Reward]:
        """The rewards that it is made of, by their full names ("r1/accuracy"); one that is not composed is its own."""
        return {self.name: self}

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
    states: States | None = None
    """None: it does not say what a completion states."""

    @property
    def asks_for(self) -> frozenset[str]:
        return frozenset(PLURALS.get(argument.name, argument.name) for argument in self.arguments)

    @property
    def reads_answers(self) -> bool:
        return self.states is not None

    def stated(self, completion: str, row: Mapping[str, Any]) -> str | None:
        if self.states is None:
            return super().stated(completion, row)
        try:
            return self.states(completion, private(row))
        except Exception as error:  # the user's code
            reason = f"reward '{self.name}' cannot say what a completion states: {type(error).__name__}: {error}"
            raise RewardError("reward_raised", reason, reward=self.name, error=type(error).__name__) from error

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

    def leaves(self) -> dict[str, Reward]:
        inner = [found for part in self.parts.values() for found in part.leaves().items()]
        return {f"{self.name}/{name}": leaf for name, leaf in inner}

    def bind(self, known: Known, name: str) -> Branch:
        parts = {short: part.bind(known, f"{name}/{short}") for short, part in self.parts.items()}
        return Branch(name, parts, self.metrics, self.combination)
