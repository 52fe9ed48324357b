"""A reward with its options set. `create_reward` makes rewards.

A run binds the inputs of a reward to its columns (`CallableReward.bind`), and calls it for every group (`calls`). A
library scores with a reward directly (`Reward.score`).
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import Parameter
from pathlib import Path
from typing import Any, Self, overload

from gristmill_env.answers.comparison import canonical_answer
from gristmill_env.answers.extraction import final_answer
from gristmill_env.errors import RewardError
from gristmill_env.rewards.inputs import ANSWER, PLURALS, RowSchema, Sample, resolve
from gristmill_env.rewards.outcomes import Outcomes, answer_of, failure_of, outcomes_of, short
from gristmill_env.rewards.registry import ExtractAnswer, Later
from gristmill_env.values import message_of, private


@dataclass(frozen=True)
class Source:
    """How another process creates a reward."""

    spec: Mapping[str, Any]
    """The reward's specification."""
    folder: Path | None
    alone: bool
    """Whether the reward shares its processes with no other reward (`process: true`)."""


@dataclass(frozen=True)
class Reward(ABC):
    """A reward with its options set. `create_reward` makes rewards."""

    name: str

    @property
    @abstractmethod
    def asks_for(self) -> frozenset[str]:
        """The fields of `Sample` and the columns that the reward reads, in the singular."""

    @abstractmethod
    def leaves(self) -> dict[str, CallableReward]:
        """Returns the rewards that are called, by their full names ("r1/accuracy"): its parts, or itself."""

    @abstractmethod
    def outcomes(self, name: str, called: Mapping[str, Sequence[Outcomes]]) -> Sequence[Outcomes]:
        """Returns the outcomes of this reward and of its parts, one item per completion.

        `name`: the reward's full name in the run. `called`: the outcomes of the leaves, by their full names."""

    @abstractmethod
    def here(self) -> Self:
        """Returns the reward for calls in this process. Raises RewardError if it cannot be made."""

    @property
    def compares(self) -> bool:
        """Whether the reward asks for the row's answer."""
        return not self.asks_for.isdisjoint(ANSWER)

    @property
    def reads_answers(self) -> bool:
        """Whether the reward extracts answers itself. Otherwise `extracted` uses the general extraction."""
        return False

    @property
    def runs_user_extraction(self) -> bool:
        """Whether `extracted` calls a user's function."""
        return False

    def extracted(self, completion: str, row: Mapping[str, Any]) -> str | None:
        """Returns the completion's final answer in canonical form; None if the completion has no final answer.

        Raises RewardError when the reward's extraction fails.
        """
        answer = final_answer(completion)
        return None if answer is None else canonical_answer(answer)

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
        from gristmill_env.rewards.library import samples_of, score  # here, because that module imports this one

        if isinstance(completions, Sample):
            return score(self, samples_of(self.name, [completions], inputs))[0]
        return score(self, samples_of(self.name, completions, inputs))


@dataclass(frozen=True)
class CallableReward(Reward):
    """A reward that is called: a function, or an instance of a class with `__call__`."""

    function: Callable[..., Any]
    source: Source | None = field(default=None, kw_only=True)
    """How another process creates the reward, so that a run calls it there. None: this process calls it."""

    @abstractmethod
    def bind(self, schema: RowSchema, name: str) -> BoundReward:
        """Resolves the reward's inputs to the inputs of a run.

        `name`: the reward's full name in the run. Raises RewardError when the reward asks for an input that the run
        does not have.
        """

    def extraction(self, name: str) -> BoundReward:
        """Returns the extraction of answers (`extracted`), which is called with the completion and row of a sample."""
        return BoundReward(f"{name}.extract_answer", self, self.extracted, _of_extraction, read=answer_of)

    @property
    def is_built_in(self) -> bool:
        """Whether the reward runs code of this package only."""
        return is_built_in(self.function) and not self.runs_user_extraction

    @property
    def reads_tokens(self) -> bool:
        """Whether the reward may read the token ids of a sample."""
        return "tokens" in self.asks_for

    def leaves(self) -> dict[str, CallableReward]:
        return {self.name: self}

    def outcomes(self, name: str, called: Mapping[str, Sequence[Outcomes]]) -> Sequence[Outcomes]:
        return called[name]

    def here(self) -> Self:
        function = self.function.instance() if isinstance(self.function, Later) else self.function
        return replace(self, source=None, function=function)


def _of_extraction(samples: Sequence[Sample]) -> dict[str, Any]:
    return {"completion": samples[0].completion, "row": samples[0].row}


@dataclass(frozen=True)
class FunctionReward(CallableReward):
    """A reward that declares its inputs as arguments (`inputs`)."""

    arguments: tuple[Parameter, ...]
    extract_answer: ExtractAnswer | None = None
    """Extracts a completion's answer; None if the reward does not extract answers itself."""

    @property
    def asks_for(self) -> frozenset[str]:
        return frozenset(PLURALS.get(argument.name, argument.name) for argument in self.arguments)

    @property
    def reads_answers(self) -> bool:
        return self.extract_answer is not None

    @property
    def runs_user_extraction(self) -> bool:
        return self.extract_answer is not None and not is_built_in(self.extract_answer)

    def extracted(self, completion: str, row: Mapping[str, Any]) -> str | None:
        if self.extract_answer is None:
            return super().extracted(completion, row)
        try:
            extracted: object = self.extract_answer(completion, private(row))
        except Exception as error:  # the user's code
            kind = type(error).__name__
            reason = f"reward '{self.name}' cannot say what a completion states: {kind}: {message_of(error)}"
            raise RewardError("reward_raised", reason, reward=self.name, error=kind) from error
        if extracted is not None and not isinstance(extracted, str):
            reason = f"extract_answer of reward '{self.name}' returned {short(extracted)}; it must be text or None"
            raise RewardError("value_invalid", reason, reward=self.name)
        return extracted

    def bind(self, schema: RowSchema, name: str) -> BoundReward:
        inputs = resolve(self.name, self.arguments, schema)
        return BoundReward(name, self, self.function, inputs.gather, inputs.group_level)


@dataclass(frozen=True)
class BoundReward:
    """A reward that is bound to a run, or its extraction of answers. Both are called in the same way."""

    name: str
    """The name in the run, for example "combined/accuracy" inside a composed reward."""
    reward: CallableReward
    function: Callable[..., Any]
    arguments: Callable[[Sequence[Sample]], Mapping[str, Any]]
    """Returns the function's arguments for these samples."""
    group_level: bool = False
    """Whether the function is called once for all samples of a group and returns a list."""
    hint: str = ""
    """Text added to a TypeError: a possible problem with the arguments."""
    read: Callable[[str, object], Outcomes] = outcomes_of
    """Returns the outcomes for a returned value. Gets `name`."""

    @cached_property
    def is_async(self) -> bool:
        """Whether a call returns an awaitable: `async def`, also under decorators, partial or as `__call__`."""
        function = inspect.unwrap(_bare(self.function))
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

    def calls(self, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
        """Returns the samples of each call for a group."""
        return [samples] if self.group_level else [[sample] for sample in samples]

    def call(self, samples: Sequence[Sample]) -> list[Outcomes]:
        """Calls a plain function. Returns the outcomes for each of the samples."""
        try:
            value = self.function(**self.arguments(samples))
            if inspect.isawaitable(value):
                if inspect.iscoroutine(value):
                    value.close()
                raise RewardError("not_async", "it returns an awaitable but is not `async def`")
            return self._read(value, len(samples))
        except BaseException as error:  # noqa: BLE001  sys.exit() in a reward must not end this thread
            return self.failed(error, samples)

    async def call_async(self, samples: Sequence[Sample]) -> list[Outcomes]:
        """Calls an async function. Returns the outcomes for each of the samples."""
        try:
            return self._read(await self.function(**self.arguments(samples)), len(samples))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return self.failed(error, samples)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            return self.failed(error, samples)

    def failed(self, why: BaseException, samples: Sequence[Sample]) -> list[Outcomes]:
        """Returns the same failure for all samples of a call."""
        failure = failure_of(self.name, why, self.hint)
        return [{self.name: failure} for _ in samples]

    def _read(self, value: object, size: int) -> list[Outcomes]:
        if not self.group_level:
            return [self.read(self.name, value)]
        if hasattr(value, "tolist"):  # array or tensor
            value = value.tolist()
        if not isinstance(value, list | tuple):
            raise RewardError(
                "not_a_list", f"a group-level reward returns a list, one value a completion, not {short(value)}"
            )
        if len(value) != size:
            raise RewardError(
                "value_count",
                f"it returned {len(value)} values for {size} completions",
                values=len(value),
                completions=size,
            )
        return [self.read(self.name, item) for item in value]


def is_built_in(function: Callable[..., Any] | None) -> bool:
    """Returns whether a function, or an instance with `__call__`, is of this package."""
    bare = _bare(function)
    module = getattr(bare, "__module__", None) or type(bare).__module__
    return module.startswith("gristmill_env.")


def _bare(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function.target if isinstance(function, Later) else function
