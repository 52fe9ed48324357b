"""Rewards with `process: true`. Each call runs in a worker process, which is killed when the call overruns.

A thread that is stuck in C code cannot be ended, and a thread that computes blocks the interpreter. A process can
always be killed. Each process imports the reward's module again, so each process has separate module state.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gristmill_env.errors import RewardError
from gristmill_env.rewards.composed import ComposedReward
from gristmill_env.rewards.inputs import RowSchema, Sample
from gristmill_env.rewards.reward import Execution, Failure, Outcome, Reward, RewardCall, RewardResult, Task
from gristmill_env.running.child import Order, plain
from gristmill_env.running.processes import ProcessPool


class _Failure(msgspec.Struct, frozen=True, array_like=True):
    """A failure, in the form that the process sends back."""

    text: str
    code: str
    values: dict[str, Any]
    may_pass: bool = False


_RESULTS = msgspec.msgpack.Decoder(list[dict[str, float | _Failure | None]])
"""The outcomes of a call for each sample, by name. Not a pickle, because the process runs third-party code."""


@dataclass(frozen=True)
class ProcessReward(Reward):
    """A reward that runs in processes."""

    inner: Reward
    """The same reward in this process, which resolves inputs and extracts answers."""
    spec: Mapping[str, Any]
    """The specification from which the process creates the reward."""
    folder: Path | None

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    @property
    def asks_for(self) -> frozenset[str]:
        return self.inner.asks_for

    @property
    def reads_answers(self) -> bool:
        return self.inner.reads_answers

    def extracted(self, completion: str, row: Mapping[str, Any]) -> str | None:
        return self.inner.extracted(completion, row)

    @property
    def runs_user_extraction(self) -> bool:
        return self.inner.runs_user_extraction

    def bind(self, schema: RowSchema, name: str, execution: Execution) -> list[Task]:
        if isinstance(self.inner, ComposedReward):
            raise RewardError(
                "composed_in_process",
                f"reward '{self.name}' is made of others; set process: true on those, not on the whole",
                reward=self.name,
            )
        (here,) = self.inner.bind(schema, name, execution)
        remote = _Remote(self.spec, self.folder, schema, execution, here)
        gather = lambda samples: {"samples": samples}  # noqa: E731
        return [Task(name, remote, here.group_level, gather, here.hint, remote.close)]


class _Remote:
    """Calls the reward in a process. The pool starts with the first call."""

    def __init__(
        self, spec: Mapping[str, Any], folder: Path | None, schema: RowSchema, execution: Execution, here: Task
    ) -> None:
        """`here`: the task with which this process would call the reward."""
        limits = execution.limits
        order = Order(
            target=f"{__name__}:serve",
            settings=pickle.dumps((dict(spec), folder, schema, here.name)),
            cpu=limits.cpu,
            wall=limits.wall,
            path=list(sys.path),
        )
        self._name, self._group_level = here.name, here.group_level
        self._pool = ProcessPool(order, execution.processes, f"reward '{here.name}'")

    async def __call__(self, samples: Sequence[Sample]) -> Any:
        try:
            job = pickle.dumps(list(samples))
        except Exception as error:  # a column may hold anything
            raise RewardError(
                "samples_not_picklable",
                f"its samples cannot be sent to a process: {type(error).__name__}: {error}",
                error=type(error).__name__,
            ) from error
        values = [self._value(result) for result in _RESULTS.decode(await self._pool.do(job, "the call"))]
        return values if self._group_level else values[0]

    def _value(self, result: Mapping[str, float | _Failure | None]) -> float | Exception | RewardResult | None:
        """Returns what the reward returned for one sample, with an error in place of each failure."""
        values = {name: _received(outcome) for name, outcome in result.items()}
        whole = values.pop(self._name)
        if isinstance(whole, Exception) or not values:
            return whole
        return RewardResult(whole, {name.removeprefix(f"{self._name}/"): value for name, value in values.items()})

    def close(self) -> None:
        """Kills the processes."""
        self._pool.close()


def serve(settings: bytes) -> Callable[[bytes], bytes]:
    """Returns the function that runs a process's jobs: from pickled samples to encoded results."""
    from gristmill_env.rewards.create import create_reward  # here, because that module imports this one

    spec, folder, schema, name = pickle.loads(settings)
    (task,) = create_reward(spec, folder=folder).bind(schema, name, Execution())

    def work(job: bytes) -> bytes:
        call = RewardCall(task, pickle.loads(job))
        results = asyncio.run(call.run_async()) if task.is_async else call.run()
        return msgspec.msgpack.encode([{name: _sent(one) for name, one in result.items()} for result in results])

    return work


def _sent(outcome: Outcome) -> float | _Failure | None:
    if not isinstance(outcome, Failure):
        return outcome
    values = {name: plain(value) for name, value in outcome.values.items()}
    return _Failure(outcome.text, outcome.code, values, outcome.may_pass)


def _received(outcome: float | _Failure | None) -> float | RewardError | None:
    if not isinstance(outcome, _Failure):
        return outcome
    error = RewardError(outcome.code, outcome.text, **outcome.values)
    error.may_pass = outcome.may_pass
    return error
