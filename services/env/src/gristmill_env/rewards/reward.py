"""A reward with its options set, what it returns, and the calls that a run makes of it.

A run binds a reward to its columns (`Reward.bind`). Each resulting `Task` is called for every group (`RewardCall`). A
library scores with a reward directly (`Reward.score`).
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, partial
from inspect import Parameter
from numbers import Real
from typing import Any, overload

from gristmill.redaction import redact_text
from gristmill_env.answers.comparison import canonical_answer
from gristmill_env.answers.extraction import final_answer
from gristmill_env.errors import RewardError
from gristmill_env.outages import may_pass
from gristmill_env.rewards.inputs import ANSWER, PLURALS, RowSchema, Sample, private, resolve
from gristmill_env.rewards.registry import ExtractAnswer
from gristmill_env.running import Call, Limits, Runner
from gristmill_env.running.calls import CallError
from gristmill_env.values import whole

_FIELDS = frozenset(one.name for one in fields(Sample)) - {"completion", "row"}


@dataclass(frozen=True)
class RewardResult:
    """A value with its parts. A reward may return this instead of a number."""

    value: float | None
    parts: Mapping[str, float | Exception | None]
    """The parts by name, shown as "reward/part". An exception means that the part failed; the value remains valid."""


Detailed = RewardResult
"""The earlier name of `RewardResult`."""


@dataclass(frozen=True)
class Failure:
    """The failure of a reward on one completion."""

    reward: str
    text: str
    """The error message, without secrets."""
    code: str
    """The error's code; "reward_raised" if the error of the reward has no code."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The error's values."""
    cause: BaseException | None = field(default=None, compare=False)
    """The error that the reward raised; None if a worker process reported the failure."""
    may_pass: bool = field(default=False, compare=False)
    """Whether the failure is of a service that may answer later."""

    def __str__(self) -> str:
        return f"{self.reward}: {self.text}"


Outcome = float | Failure | None
"""A value, None for no score, or a failure. A failure is never a 0."""

Outcomes = dict[str, Outcome]
"""The outcomes of one reward on one completion: first its own, then those of its parts ("judge", "judge/style")."""

Called = Mapping[str, Mapping[str, Sequence[Outcome]]]
"""The outcomes of each task of a group by the task's name: the task's own and those of its parts, by full name."""


@dataclass(frozen=True)
class Execution:
    """The limits, threads and processes for the calls of a run's rewards."""

    limits: Limits = field(default_factory=lambda: Limits(cpu=60.0, wall=600.0))
    """The limits of one call."""
    threads: int = 32
    """Maximum number of threads for rewards that are not async."""
    processes: int = 2
    """Number of processes for each reward that runs in processes."""


class Reward(ABC):
    """A reward with its options set. `create_reward` makes rewards."""

    name: str

    @property
    @abstractmethod
    def asks_for(self) -> frozenset[str]:
        """The fields of `Sample` and the columns that the reward reads, in the singular."""

    @abstractmethod
    def bind(self, schema: RowSchema, name: str, execution: Execution) -> list[Task]:
        """Resolves the reward's inputs to the inputs of a run. Returns the tasks that are called for each group.

        `name`: the reward's full name in the run. Raises RewardError when the reward asks for an input that the run
        does not have.
        """

    def outcomes(self, name: str, called: Called) -> Mapping[str, Sequence[Outcome]]:
        """Returns the outcomes of this reward and of its parts, by full name: first its own, one item per completion.

        `name`: as for `bind`. `called`: the outcomes of the tasks."""
        return called[name]

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
        """Scores the samples as one group, on threads that all library calls share."""
        if not samples:
            return []
        names = tuple(dict.fromkeys(str(column) for sample in samples for column in sample.row))
        schema = RowSchema(names, has_answer=any(sample.answer is not None for sample in samples))
        try:
            tasks = self.bind(schema, self.name, Execution())
        except RewardError as error:
            raise RewardError(
                error.code, f"{error} (In score(), give it by its name: score(completions, answer=...))", **error.values
            ) from error
        calls = {task.name: task.calls(samples) for task in tasks}
        _shared_runner().submit(call for made in calls.values() for call in made).done.result()
        found = self.outcomes(self.name, {name: outcomes_by_name(made) for name, made in calls.items()})[self.name]
        for outcome in found:
            if isinstance(outcome, Failure):
                raise RewardError(outcome.code, str(outcome), **outcome.values) from outcome.cause
        return [None if isinstance(outcome, Failure) else outcome for outcome in found]


@dataclass(frozen=True)
class FunctionReward(Reward):
    """A function, or an instance of a class with `__call__`."""

    name: str
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
            reason = f"extract_answer of reward '{self.name}' returned {_short(found)}; it must be text or None"
            raise RewardError("value_invalid", reason, reward=self.name)
        return found

    @property
    def runs_user_extraction(self) -> bool:
        extract: Any = self.extract_answer
        extract = extract.func if isinstance(extract, partial) else extract
        module = getattr(extract, "__module__", None) or ""
        return extract is not None and not module.startswith("gristmill_env.")

    def bind(self, schema: RowSchema, name: str, execution: Execution) -> list[Task]:
        inputs = resolve(self.name, self.arguments, schema)
        return [Task(name, self.function, inputs.group_level, inputs.gather)]


@dataclass(frozen=True)
class Task:
    """A reward that is bound to a run and can be called."""

    name: str
    """The reward's name in the run, for example "combined/accuracy" inside a composed reward."""
    function: Callable[..., Any]
    group_level: bool
    """Whether the reward is called once for all samples of a group and returns a list."""
    gather: Callable[[Sequence[Sample]], Mapping[str, Any]]
    """Returns the reward's arguments for these samples."""
    hint: str = ""
    """Text added to a TypeError: a possible problem with the arguments."""
    close: Callable[[], None] = lambda: None
    """Ends the threads and processes that the reward has started."""

    @cached_property
    def is_async(self) -> bool:
        """Whether a call returns an awaitable: `async def`, also under decorators, partial or as `__call__`."""
        function = self.function
        while isinstance(function, partial):
            function = function.func
        function = inspect.unwrap(function)
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

    def calls(self, samples: Sequence[Sample]) -> list[RewardCall]:
        """Returns the calls that score a group."""
        return [RewardCall(self, samples)] if self.group_level else [RewardCall(self, [sample]) for sample in samples]


class RewardCall(Call[list[Outcomes]]):
    """One call, for one sample or, if the reward is group-level, for all samples of a group. One result per sample."""

    def __init__(self, task: Task, samples: Sequence[Sample]) -> None:
        super().__init__(task.name, is_async=task.is_async)
        self.task = task
        self.samples = samples

    @property
    def may_pass(self) -> Failure | None:
        """The failure of a settled call because of a service that may answer later; None if it did not fail so."""
        own = (outcomes.get(self.task.name) for outcomes in self.result)
        return next((outcome for outcome in own if isinstance(outcome, Failure) and outcome.may_pass), None)

    def again(self) -> RewardCall:
        """Returns the same call, to be made again."""
        return RewardCall(self.task, self.samples)

    def run(self) -> list[Outcomes]:
        if not self.needed:
            return self.not_needed()
        try:
            value = self.task.function(**self.task.gather(self.samples))
            if inspect.isawaitable(value):
                if inspect.iscoroutine(value):
                    value.close()
                raise RewardError("not_async", "it returns an awaitable but is not `async def`")
            return self._read(value)
        except BaseException as error:  # noqa: BLE001  sys.exit() in a reward must not end this thread
            return self.failed(error)

    async def run_async(self) -> list[Outcomes]:
        if not self.needed:
            return self.not_needed()
        try:
            return self._read(await self.task.function(**self.task.gather(self.samples)))
        except BaseException as error:  # noqa: BLE001  as above; the outcomes of a cancelled call are not read
            return self.failed(error)

    def failed(self, why: BaseException) -> list[Outcomes]:
        """Returns the same failure for all samples of the call."""
        failure = _failure(self.task.name, why, self.task.hint)
        return [{self.task.name: failure} for _ in self.samples]

    def _read(self, value: object) -> list[Outcomes]:
        if not self.task.group_level:
            return [_outcomes(self.task.name, value)]
        if hasattr(value, "tolist"):  # array or tensor
            value = value.tolist()
        if not isinstance(value, list | tuple):
            raise RewardError(
                "not_a_list", f"a group-level reward returns a list, one value a completion, not {_short(value)}"
            )
        if len(value) != len(self.samples):
            raise RewardError(
                "value_count",
                f"it returned {len(value)} values for {len(self.samples)} completions",
                values=len(value),
                completions=len(self.samples),
            )
        return [_outcomes(self.task.name, item) for item in value]


def outcomes_by_name(calls: Sequence[RewardCall]) -> dict[str, Sequence[Outcome]]:
    """Returns the outcomes of one task's settled calls by name, one item per sample. A part that a sample lacks is None
    there."""
    results = [outcomes for call in calls for outcomes in call.result]
    names = dict.fromkeys(name for outcomes in results for name in outcomes)
    return {name: [outcomes.get(name) for outcomes in results] for name in names}


def _outcomes(reward: str, value: object) -> Outcomes:
    if not isinstance(value, RewardResult):
        return {reward: _outcome(reward, value)}
    if not isinstance(value.parts, Mapping) or not all(isinstance(name, str) for name in value.parts):
        wrong = f"parts of a RewardResult have a name each, not {_short(value.parts)}"
        return {reward: Failure(reward, wrong, "value_invalid")}
    parts = {f"{reward}/{part}": item for part, item in value.parts.items()}
    return {reward: _outcome(reward, value.value)} | {name: _outcome(name, item) for name, item in parts.items()}


def _outcome(reward: str, value: object) -> Outcome:
    if isinstance(value, Exception):
        return _failure(reward, value)
    if hasattr(value, "tolist"):  # a number of numpy or torch
        value = value.tolist()
    if value is None:
        return None
    try:
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    return Failure(reward, f"a reward returns a finite number or None, not {_short(value)}", "value_invalid")


def _failure(reward: str, error: BaseException, hint: str = "") -> Failure:
    """Returns the failure for an `error` of a reward or for a CallError. `hint`: text added to a TypeError."""
    if isinstance(error, RewardError):
        return Failure(reward, whole(redact_text(str(error))), error.code, error.values, error, may_pass(error))
    if isinstance(error, CallError):
        return Failure(reward, whole(redact_text(str(error))), error.code, error.values)
    kind = type(error).__name__
    text = f"{kind}: {error}{hint if isinstance(error, TypeError) else ''}"
    return Failure(reward, whole(redact_text(text)), "reward_raised", {"error": kind}, error, may_pass(error))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@cache
def _shared_runner() -> Runner:
    return Runner(Execution().limits)


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
