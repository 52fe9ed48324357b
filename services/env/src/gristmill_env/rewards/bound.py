"""A reward whose inputs are resolved for a run, so that it can be called."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from gristmill_env.errors import RewardError
from gristmill_env.rewards.inputs import Sample
from gristmill_env.rewards.outcomes import Outcomes, failure_of, outcomes_of, short
from gristmill_env.rewards.registry import Later

if TYPE_CHECKING:  # reward.py imports this module
    from gristmill_env.rewards.reward import CallableReward


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
