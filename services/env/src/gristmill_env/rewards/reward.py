"""Rewards with their options set. They can be bound to a run's columns, or used as a library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from gristmill_env.answers.comparison import one_form
from gristmill_env.answers.extraction import final_answer
from gristmill_env.errors import RewardError
from gristmill_env.rewards.calls import Task
from gristmill_env.rewards.inputs import ANSWER, PLURALS, Known, resolve
from gristmill_env.rewards.library import score_now
from gristmill_env.rewards.plan import Branch, Combination, Node
from gristmill_env.rewards.registry import States
from gristmill_env.rewards.sample import Sample, private
from gristmill_env.rewards.signature import Argument, is_async


class Reward(ABC):
    """A reward with its options set. `create_reward` makes rewards."""

    name: str

    @property
    @abstractmethod
    def asks_for(self) -> frozenset[str]:
        """The fields of `Sample` and the columns that the reward reads, in the singular."""

    @abstractmethod
    def bind(self, known: Known, name: str) -> Node:
        """Resolves the reward's inputs to the inputs of a run. `name`: the reward's full name in the run.

        Raises RewardError when the reward asks for an input that the run does not have.
        """

    @property
    def compares(self) -> bool:
        """Whether the reward asks for the row's answer."""
        return not self.asks_for.isdisjoint(ANSWER)

    @property
    def reads_answers(self) -> bool:
        """Whether the reward extracts answers itself. Otherwise `stated` uses the general extraction."""
        return False

    def stated(self, completion: str, row: Mapping[str, Any]) -> str | None:
        """Returns the completion's final answer in canonical form; None if the completion has no final answer.

        Raises RewardError when the reward's extraction fails.
        """
        answer = final_answer(completion)
        return None if answer is None else one_form(answer)

    def leaves(self) -> dict[str, Reward]:
        """Returns the reward's parts by their full names ("r1/accuracy"). A reward without parts returns itself."""
        return {self.name: self}

    @overload
    def score(self, completions: Sample) -> float | None: ...

    @overload
    def score(self, completions: Sequence[str | Sample], **inputs: Any) -> list[float | None]: ...

    def score(self, completions: Sample | Sequence[str | Sample], **inputs: Any) -> float | list[float | None] | None:
        """Scores the completions of one prompt, without weights. Works with and without a running event loop.

        `inputs`: the reward's inputs, by the names of `Sample` fields or of columns. A list holds one item per
        completion. All completions share any other value: `score(["#### 72", "72"], answer="#### 72")`. Completions
        may be samples instead of texts. A single sample gives a single value.

        Raises RewardError when the reward fails or lacks an input.
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
    """Extracts a completion's answer; None if the reward does not extract answers itself."""

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
    """A reward computed from other rewards, each of which is called and shown separately."""

    name: str
    parts: Mapping[str, Reward]
    metrics: frozenset[str]
    """Parts with weight 0."""
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
