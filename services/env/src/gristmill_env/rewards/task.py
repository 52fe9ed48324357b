"""A reward that is bound to a run, and its calls in this process.

`BuiltInCalls` are of the rewards of this package, whose time and memory for a completion are bounded. `LimitedCalls`
are of other code, also in the processes of a user's rewards (`hosted`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

from gristmill.redaction import redact_text
from gristmill_env.errors import RewardError
from gristmill_env.gather import gather
from gristmill_env.rewards.inputs import Sample
from gristmill_env.rewards.outcomes import Outcomes, failure_of, outcomes_of, short
from gristmill_env.rewards.registry import Later
from gristmill_env.running.limiter import Limiter
from gristmill_env.running.limits import CallError, Limits

if TYPE_CHECKING:  # reward.py imports this module
    from gristmill_env.rewards.reward import Reward

Extracted = str | RewardError | None
"""The answer in a text, the error of its extraction, or None if the text has no answer."""


@dataclass(frozen=True)
class Execution:
    """The limits, threads and processes for the calls of a run's rewards."""

    limits: Limits = field(default_factory=lambda: Limits(cpu=60.0, wall=600.0))
    """The limits of one call. `cpu` is also how long a process may be blocked."""
    threads: int = 32
    """Maximum number of threads for rewards that are not async."""
    processes: int = 2
    """Number of processes for each reward with `process: true`."""


@dataclass(frozen=True)
class Task:
    """A reward that is bound to a run and can be called."""

    name: str
    """The reward's name in the run, for example "combined/accuracy" inside a composed reward."""
    reward: Reward
    function: Callable[..., Any]
    group_level: bool
    """Whether the reward is called once for all samples of a group and returns a list."""
    gather: Callable[[Sequence[Sample]], Mapping[str, Any]]
    """Returns the reward's arguments for these samples."""
    hint: str = ""
    """Text added to a TypeError: a possible problem with the arguments."""

    @cached_property
    def is_async(self) -> bool:
        """Whether a call returns an awaitable: `async def`, also under decorators, partial or as `__call__`."""
        function = inspect.unwrap(_bare(self.function))
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

    def calls(self, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
        """Returns the samples of each call that scores a group."""
        return [samples] if self.group_level else [[sample] for sample in samples]

    def call(self, samples: Sequence[Sample]) -> list[Outcomes]:
        """Calls a plain reward. Returns the outcomes for each of the samples."""
        try:
            value = self.function(**self.gather(samples))
            if inspect.isawaitable(value):
                if inspect.iscoroutine(value):
                    value.close()
                raise RewardError("not_async", "it returns an awaitable but is not `async def`")
            return self._read(value, len(samples))
        except BaseException as error:  # noqa: BLE001  sys.exit() in a reward must not end this thread
            return self.failed(error, samples)

    async def call_async(self, samples: Sequence[Sample]) -> list[Outcomes]:
        """Calls an async reward. Returns the outcomes for each of the samples."""
        try:
            return self._read(await self.function(**self.gather(samples)), len(samples))
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

    def extract(self, text: str, row: Mapping[str, Any]) -> Extracted:
        """Returns the answer that the reward finds in a text, or its error."""
        try:
            return self.reward.extracted(text, row)
        except BaseException as error:  # noqa: BLE001  as above
            return self.not_extracted(error)

    def not_extracted(self, why: BaseException) -> RewardError:
        """Returns the error of an extraction."""
        if isinstance(why, RewardError):
            return why
        text = redact_text(f"extract_answer of {self.name}: {why!r}")
        if isinstance(why, CallError):
            return RewardError(why.code, text, reward=self.name)
        return RewardError("reward_raised", text, reward=self.name)

    def _read(self, value: object, size: int) -> list[Outcomes]:
        if not self.group_level:
            return [outcomes_of(self.name, value)]
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
        return [outcomes_of(self.name, item) for item in value]


def is_built_in(function: Callable[..., Any] | None) -> bool:
    """Returns whether a function, or an instance with `__call__`, is of this package."""
    bare = _bare(function)
    module = getattr(bare, "__module__", None) or type(bare).__module__
    return module.startswith("gristmill_env.")


def _bare(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function.target if isinstance(function, Later) else function


class Calls(Protocol):
    """The calls of one task, in this process or in another."""

    async def outcomes(self, samples: Sequence[Sample]) -> list[Outcomes]:
        """Scores a group. Returns the outcomes for each sample."""

    async def extracted(self, texts: Sequence[str], row: Mapping[str, Any]) -> list[Extracted]:
        """Returns the answer that the reward finds in each text."""


class BuiltInCalls:
    """The calls of a reward of this package: async ones on this event loop, those of a group in one thread."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def outcomes(self, samples: Sequence[Sample]) -> list[Outcomes]:
        """Scores a group."""
        calls = self._task.calls(samples)
        if self._task.is_async:
            return _joined(await gather(self._task.call_async(call) for call in calls))
        return await asyncio.to_thread(lambda: _joined(self._task.call(call) for call in calls))

    async def extracted(self, texts: Sequence[str], row: Mapping[str, Any]) -> list[Extracted]:
        """Extracts the answers."""
        return await asyncio.to_thread(lambda: [self._task.extract(text, row) for text in texts])


class LimitedCalls:
    """The calls of any other reward in this process, within limits."""

    def __init__(self, task: Task, limiter: Limiter) -> None:
        self._task, self._limiter = task, limiter

    async def outcomes(self, samples: Sequence[Sample]) -> list[Outcomes]:
        """Scores a group. All calls run at the same time, as far as there are threads."""
        task, calls = self._task, self._task.calls(samples)
        if task.is_async:
            found = await self._limiter.on_loop(task.call_async(call) for call in calls)
        else:
            found = await self._limiter.in_threads(partial(task.call, call) for call in calls)
        return _joined(
            task.failed(one, call) if isinstance(one, CallError) else one
            for call, one in zip(calls, found, strict=True)
        )

    async def extracted(self, texts: Sequence[str], row: Mapping[str, Any]) -> list[Extracted]:
        """Extracts the answers, all at the same time."""
        found = await self._limiter.in_threads(partial(self._task.extract, text, row) for text in texts)
        return [self._task.not_extracted(one) if isinstance(one, CallError) else one for one in found]


def _joined(found: Iterable[list[Outcomes]]) -> list[Outcomes]:
    return [outcomes for results in found for outcomes in results]
