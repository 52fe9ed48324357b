"""A call of a reward, and what came of it."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from typing import Any

from gristmill.redaction import redact_text
from gristmill_env.errors import RewardError
from gristmill_env.rewards.sample import Detailed, Sample


@dataclass(frozen=True)
class Failure:
    """A reward that gave no value where it should have."""

    reward: str
    text: str
    """What went wrong, in one line."""
    cause: BaseException | None = None
    """What it raised."""

    def __str__(self) -> str:
        return f"{self.reward}: {self.text}"


Outcome = float | None | Failure
"""A value; None: nothing to say; or an error, which is never a 0."""


@dataclass(frozen=True)
class Parted:
    """What a reward said together with its parts (`Detailed`)."""

    whole: Outcome
    parts: Mapping[str, Outcome]


Said = Outcome | Parted


@dataclass(frozen=True)
class Task:
    """A reward, ready to be called."""

    name: str
    """Its name in the run: "combined/accuracy" inside a composed one."""
    function: Callable[..., Any]
    is_async: bool
    group_level: bool
    """It is called once for all samples of a group, and gives a list."""
    gather: Callable[[Sequence[Sample]], Mapping[str, Any]]
    """Its arguments for these samples."""
    hint: str = ""
    """Told with a TypeError: what may be wrong with its arguments."""

    def calls(self, samples: Sequence[Sample]) -> list[Call]:
        """The calls that score a group."""
        return [Call(self, samples)] if self.group_level else [Call(self, [sample]) for sample in samples]


class Call:
    """One call: for one sample, or for all samples of a group where the reward is group-level.

    It may be run more than once, or be given up while it runs; what settles it first counts.
    """

    __slots__ = ("_open", "batch", "needed", "outcomes", "samples", "task")

    def __init__(self, task: Task, samples: Sequence[Sample]) -> None:
        self.task = task
        self.samples = samples
        self.outcomes: list[Said] = []
        """One a sample, once it is settled."""
        self.batch: Batch | None = None
        self.needed = True
        """False: nobody waits for it any more, so it need not begin."""
        self._open = [True]

    @property
    def is_open(self) -> bool:
        """Whether it is not settled yet."""
        return bool(self._open)

    def claim(self) -> bool:
        """Whether the caller is the one to publish the outcomes. Of several threads one is.

        Takes no lock: a thread that is given up may be interrupted here.
        """
        try:
            return self._open.pop()  # atomic
        except IndexError:
            return False

    def publish(self, outcomes: list[Said]) -> None:
        """Settle it; for the one that has claimed it."""
        self.outcomes = outcomes
        if self.batch is not None:
            self.batch.one_less()

    def settle(self, outcomes: list[Said]) -> bool:
        """Take these outcomes, unless there are some. Returns whether they were taken."""
        if not self.claim():
            return False
        self.publish(outcomes)
        return True

    def run(self) -> list[Said]:
        """Call a reward that is not async, on this thread. Whatever it does wrong is in the outcomes."""
        if not self.needed:
            return self.failed("it is not needed any more")
        try:
            value = self.task.function(**self.task.gather(self.samples))
            if inspect.isawaitable(value):
                if inspect.iscoroutine(value):
                    value.close()
                raise RewardError("it returns an awaitable but is not `async def`")
            return self._read(value)
        except BaseException as error:  # noqa: BLE001  sys.exit() in a reward must not end this thread
            return self.failed(error)

    async def run_async(self) -> list[Said]:
        """Call an async reward. Whatever it does wrong is in the outcomes."""
        if not self.needed:
            return self.failed("it is not needed any more")
        try:
            return self._read(await self.task.function(**self.task.gather(self.samples)))
        except BaseException as error:  # noqa: BLE001  as above; of a cancelled call nobody reads the outcomes
            return self.failed(error)

    def failed(self, why: BaseException | str) -> list[Said]:
        """The same failure for all of its samples."""
        if isinstance(why, str):
            return [Failure(self.task.name, redact_text(why))] * len(self.samples)
        text = str(why) if isinstance(why, RewardError) else f"{type(why).__name__}: {why}"
        if isinstance(why, TypeError):
            text += self.task.hint
        return [Failure(self.task.name, redact_text(text), why)] * len(self.samples)

    def _read(self, value: object) -> list[Said]:
        if not self.task.group_level:
            return [_said(self.task.name, value)]
        if hasattr(value, "tolist"):  # arrays and tensors
            value = value.tolist()
        if not isinstance(value, list | tuple):
            raise RewardError(f"a group-level reward returns a list, one value a completion, not {_short(value)}")
        if len(value) != len(self.samples):
            raise RewardError(f"it returned {len(value)} values for {len(self.samples)} completions")
        return [_said(self.task.name, item) for item in value]


class Batch:
    """Calls that are waited for together."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self.calls = list(calls)
        self.done: Future[None] = Future()
        """Done once every call is settled. Its error is one that ends the run."""
        self.done.set_running_or_notify_cancel()  # a waiter that goes away must not cancel it
        self._left = len(self.calls)
        self._lock = threading.Lock()
        for call in self.calls:
            call.batch = self
        if not self.calls:
            self.done.set_result(None)

    def one_less(self) -> None:
        """One of the calls is settled."""
        with self._lock:
            self._left -= 1
            if self._left == 0 and not self.done.done():
                self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Tell the waiter now that nothing will come of it."""
        with self._lock:
            if not self.done.done():
                self.done.set_exception(error)

    def drop(self) -> None:
        """Nobody waits any more."""
        for call in self.calls:
            call.needed = False


def _said(reward: str, value: object) -> Said:
    if not isinstance(value, Detailed):
        return _outcome(reward, value)
    return Parted(
        _outcome(reward, value.value), {part: _outcome(f"{reward}/{part}", item) for part, item in value.parts.items()}
    )


def _outcome(reward: str, value: object) -> Outcome:
    if isinstance(value, Exception):
        return Failure(reward, redact_text(f"{type(value).__name__}: {value}"), value)
    if hasattr(value, "tolist"):  # numbers of numpy and torch
        value = value.tolist()
    if value is None:
        return None
    try:
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    return Failure(reward, f"a reward returns a finite number or None, not {_short(value)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
