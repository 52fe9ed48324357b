"""A reward with its options set. `create_reward` makes rewards.

A run binds a reward to its columns (`Reward.bind`), and calls each resulting task for every group (`task`, `hosted`). A
library scores with a reward directly (`Reward.score`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from inspect import Parameter
from pathlib import Path
from typing import Any, overload

from gristmill_env.answers.comparison import canonical_answer
from gristmill_env.answers.extraction import final_answer
from gristmill_env.errors import RewardError
from gristmill_env.gather import gather
from gristmill_env.rewards.inputs import ANSWER, PLURALS, RowSchema, Sample, private, resolve
from gristmill_env.rewards.outcomes import Called, Failure, Outcome, by_name, short
from gristmill_env.rewards.registry import ExtractAnswer, Later
from gristmill_env.rewards.task import BuiltInCalls, Calls, Execution, LimitedCalls, Task, is_built_in
from gristmill_env.running.limiter import Limiter

_FIELDS = frozenset(one.name for one in fields(Sample)) - {"completion", "row"}


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
    source: Source | None = field(default=None, kw_only=True)
    """How another process creates the reward, so that a run calls it there. None: this process calls it."""

    @property
    @abstractmethod
    def asks_for(self) -> frozenset[str]:
        """The fields of `Sample` and the columns that the reward reads, in the singular."""

    @abstractmethod
    def bind(self, schema: RowSchema, name: str) -> list[Task]:
        """Resolves the reward's inputs to the inputs of a run. Returns the tasks that are called for each group.

        `name`: the reward's full name in the run. Raises RewardError when the reward asks for an input that the run
        does not have.
        """

    def outcomes(self, name: str, called: Called) -> Mapping[str, Sequence[Outcome]]:
        """Returns the outcomes of this reward and of its parts, by full name: first its own, one item per completion.

        `name`: as for `bind`. `called`: the outcomes of the tasks."""
        return called[name]

    @property
    def is_built_in(self) -> bool:
        """Whether the reward runs code of this package only."""
        return False

    @property
    def reads_tokens(self) -> bool:
        """Whether the reward may read the token ids of a sample."""
        return True

    @property
    def compares(self) -> bool:
        """Whether the reward asks for the row's answer."""
        return not self.asks_for.isdisjoint(ANSWER)

    @property
    def reads_answers(self) -> bool:
        """Whether the reward extracts answers itself. Otherwise `extracted` uses the general extraction."""
        return False

    def extracted(self, completion: str, row: Mapping[str, Any]) -> str | None:
        """Returns the completion's final answer in canonical form; None if the completion has no final answer.

        Raises RewardError when the reward's extraction fails.
        """
        answer = final_answer(completion)
        return None if answer is None else canonical_answer(answer)

    @property
    def runs_user_extraction(self) -> bool:
        """Whether `extracted` calls a user's function."""
        return False

    def here(self) -> Reward:
        """Returns the reward for calls in this process. Raises RewardError if it cannot be made."""
        return replace(self, source=None)

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
            return self._score_group(_samples(self.name, [completions], inputs))[0]
        if isinstance(completions, str):
            raise RewardError(
                "completions_not_a_list",
                f"reward '{self.name}': score() takes a list of completions; write [completion]",
                reward=self.name,
            )
        return self._score_group(_samples(self.name, completions, inputs))

    def _score_group(self, samples: Sequence[Sample]) -> list[float | None]:
        """Scores the samples as one group, on an event loop that all library calls share."""
        if not samples:
            return []
        names = tuple(dict.fromkeys(str(column) for sample in samples for column in sample.row))
        schema = RowSchema(names, has_answer=any(sample.answer is not None for sample in samples))
        try:
            tasks = self.here().bind(schema, self.name)
        except RewardError as error:
            raise RewardError(
                error.code, f"{error} (In score(), give it by its name: score(completions, answer=...))", **error.values
            ) from error
        called = asyncio.run_coroutine_threadsafe(_called(tasks, samples), _library_loop()).result()
        found = self.outcomes(self.name, called)[self.name]
        for outcome in found:
            if isinstance(outcome, Failure):
                raise RewardError(outcome.code, str(outcome), **outcome.values) from outcome.cause
        return [None if isinstance(outcome, Failure) else outcome for outcome in found]


@dataclass(frozen=True)
class FunctionReward(Reward):
    """A function, or an instance of a class with `__call__`."""

    function: Callable[..., Any]
    arguments: tuple[Parameter, ...]
    extract_answer: ExtractAnswer | None = None
    """Extracts a completion's answer; None if the reward does not extract answers itself."""

    @property
    def asks_for(self) -> frozenset[str]:
        return frozenset(PLURALS.get(argument.name, argument.name) for argument in self.arguments)

    @property
    def reads_answers(self) -> bool:
        return self.extract_answer is not None

    def extracted(self, completion: str, row: Mapping[str, Any]) -> str | None:
        if self.extract_answer is None:
            return super().extracted(completion, row)
        try:
            found: object = self.extract_answer(completion, private(row))
        except Exception as error:  # the user's code
            reason = f"reward '{self.name}' cannot say what a completion states: {type(error).__name__}: {error}"
            raise RewardError("reward_raised", reason, reward=self.name, error=type(error).__name__) from error
        if found is not None and not isinstance(found, str):
            reason = f"extract_answer of reward '{self.name}' returned {short(found)}; it must be text or None"
            raise RewardError("value_invalid", reason, reward=self.name)
        return found

    @property
    def runs_user_extraction(self) -> bool:
        return self.extract_answer is not None and not is_built_in(self.extract_answer)

    @property
    def is_built_in(self) -> bool:
        return is_built_in(self.function) and not self.runs_user_extraction

    @property
    def reads_tokens(self) -> bool:
        return "tokens" in self.asks_for

    def here(self) -> FunctionReward:
        function = self.function.instance() if isinstance(self.function, Later) else self.function
        return replace(self, source=None, function=function)

    def bind(self, schema: RowSchema, name: str) -> list[Task]:
        inputs = resolve(self.name, self.arguments, schema)
        return [Task(name, self, self.function, inputs.group_level, inputs.gather)]


def calls_here(task: Task, limiter: Limiter) -> Calls:
    """Returns the calls of a task in this process."""
    return BuiltInCalls(task) if task.reward.is_built_in else LimitedCalls(task, limiter)


async def _called(tasks: Sequence[Task], samples: Sequence[Sample]) -> Called:
    limiter = Limiter(Execution().limits, Execution().threads)
    found = await gather(calls_here(task, limiter).outcomes(samples) for task in tasks)
    return {task.name: by_name(outcomes) for task, outcomes in zip(tasks, found, strict=True)}


@cache
def _library_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_library_loop.cache_clear)  # a forked child has none of its parent's threads


def _samples(name: str, completions: Sequence[str | Sample], inputs: Mapping[str, Any]) -> list[Sample]:
    if any(isinstance(completion, Sample) for completion in completions):
        if inputs or not all(isinstance(completion, Sample) for completion in completions):
            raise RewardError(
                "samples_and_inputs",
                f"reward '{name}': a Sample holds all inputs; give samples only, or texts and inputs",
                reward=name,
            )
        return [completion for completion in completions if isinstance(completion, Sample)]
    size = len(completions)
    columns: dict[str, list[Any]] = {}
    for key, value in inputs.items():
        if isinstance(value, list) and not _one_message_list(key, value):
            if len(value) != size:
                raise RewardError(
                    "length_mismatch",
                    f"reward '{name}': {key} has {len(value)} items for {size} completions; a list holds one each, "
                    'anything else is shared by all. (Share a list as a column: row={"name": [...]})',
                    reward=name,
                    field=key,
                )
            columns[_singular(key)] = value
        else:
            columns[_singular(key)] = [value] * size
    samples = []
    for at, completion in enumerate(completions):
        if not isinstance(completion, str):
            raise RewardError(
                "completion_not_text",
                f"reward '{name}': completion {at} is {completion!r:.60}; it must be text",
                reward=name,
                at=at,
            )
        own = {key: _as_text(key, values[at]) for key, values in columns.items()}
        row = {**own.pop("row", {}), **{key: own.pop(key) for key in [*own] if key not in _FIELDS}}
        samples.append(Sample(completion, row=row, **own))
    return samples


def _singular(key: str) -> str:
    key = PLURALS.get(key, key)
    return "answer" if key == "ground_truth" else key


def _one_message_list(key: str, value: list[Any]) -> bool:
    return key == "messages" and bool(value) and isinstance(value[0], Mapping)


def _as_text(key: str, value: Any) -> Any:
    """Converts a number given as an answer to text, because answers are text in a run."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if number and key == "answer" else value
