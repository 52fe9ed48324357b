"""Calls of rewards, and what rewards return: a value, no score, or a failure."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Real
from typing import Any

from gristmill.redaction import redact_text
from gristmill_env.errors import RewardError
from gristmill_env.rewards.inputs import Sample
from gristmill_env.running import Call
from gristmill_env.running.calls import CallError


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

    def __str__(self) -> str:
        return f"{self.reward}: {self.text}"


Outcome = float | Failure | None
"""A value, None for no score, or a failure. A failure is never a 0."""

Outcomes = dict[str, Outcome]
"""The outcomes of one reward on one completion: first its own, then those of its parts ("judge", "judge/style")."""


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
        return Failure(reward, redact_text(str(error)), error.code, error.values, error)
    if isinstance(error, CallError):
        return Failure(reward, redact_text(str(error)), error.code, error.values)
    kind = type(error).__name__
    text = f"{kind}: {error}{hint if isinstance(error, TypeError) else ''}"
    return Failure(reward, redact_text(text), "reward_raised", {"error": kind}, error)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
