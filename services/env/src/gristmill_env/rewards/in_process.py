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
from gristmill_env.rewards.calls import Outcome, Parted, RewardCall, Said, Task
from gristmill_env.rewards.inputs import Known
from gristmill_env.rewards.reward import Reward
from gristmill_env.rewards.sample import Detailed, Failure, Sample
from gristmill_env.running.child import Order, plain
from gristmill_env.running.processes import ProcessPool


class _Failure(msgspec.Struct, frozen=True, array_like=True):
    """A failure, in the form that the process sends back."""

    text: str
    code: str
    values: dict[str, Any]


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """One outcome, in the form that the process sends back. Not a pickle, because the process runs third-party code."""

    said: float | _Failure | None
    parts: dict[str, float | _Failure | None] | None = None


_ANSWERS = msgspec.msgpack.Decoder(list[_Answer])


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

    def stated(self, completion: str, row: Mapping[str, Any]) -> str | None:
        return self.inner.stated(completion, row)

    def bind(self, known: Known, name: str) -> Task:
        here = self.inner.bind(known, name)
        if not isinstance(here, Task):
            raise RewardError(
                "composed_in_process",
                f"reward '{self.name}' is made of others; set process: true on those, not on the whole",
                reward=self.name,
            )
        remote = _Remote(self.spec, self.folder, known, here)
        gather = lambda samples: {"samples": samples}  # noqa: E731
        return Task(name, remote, True, here.group_level, gather, here.hint, remote.close)


class _Remote:
    """Calls the reward in a process. The pool starts with the first call."""

    def __init__(self, spec: Mapping[str, Any], folder: Path | None, known: Known, here: Task) -> None:
        """`here`: the task with which this process would call the reward."""
        limits = known.execution.limits
        order = Order(
            target=f"{__name__}:serve",
            settings=pickle.dumps((dict(spec), folder, known, here.name)),
            cpu=limits.cpu,
            wall=limits.wall,
            path=list(sys.path),
        )
        self._group_level = here.group_level
        self._pool = ProcessPool(order, known.execution.processes, f"reward '{here.name}'")

    async def __call__(self, samples: Sequence[Sample]) -> Any:
        try:
            job = pickle.dumps(list(samples))
        except Exception as error:  # a column may hold anything
            raise RewardError(
                "samples_not_picklable",
                f"its samples cannot be sent to a process: {type(error).__name__}: {error}",
                error=type(error).__name__,
            ) from error
        values = [_value(answer) for answer in _ANSWERS.decode(await self._pool.do(job, "the call"))]
        return values if self._group_level else values[0]

    def close(self) -> None:
        """Kills the processes."""
        self._pool.close()


def serve(settings: bytes) -> Callable[[bytes], bytes]:
    """Returns the function that runs a process's jobs: from pickled samples to encoded answers."""
    from gristmill_env.rewards.create import create_reward  # here, because that module imports this one

    spec, folder, known, name = pickle.loads(settings)
    task = create_reward(spec, folder=folder).bind(known, name)
    assert isinstance(task, Task)

    def work(job: bytes) -> bytes:
        call = RewardCall(task, pickle.loads(job))
        said = asyncio.run(call.run_async()) if task.is_async else call.run()
        return msgspec.msgpack.encode([_answer(one) for one in said])

    return work


def _answer(said: Said) -> _Answer:
    if isinstance(said, Parted):
        return _Answer(_sent(said.whole), {name: _sent(part) for name, part in said.parts.items()})
    return _Answer(_sent(said))


def _sent(outcome: Outcome) -> float | _Failure | None:
    if not isinstance(outcome, Failure):
        return outcome
    return _Failure(outcome.text, outcome.code, {name: plain(value) for name, value in outcome.values.items()})


def _value(answer: _Answer) -> float | Exception | Detailed | None:
    said = _received(answer.said)
    if answer.parts is None or isinstance(said, Exception):
        return said
    return Detailed(said, {name: _received(part) for name, part in answer.parts.items()})


def _received(said: float | _Failure | None) -> float | RewardError | None:
    return RewardError(said.code, said.text, **said.values) if isinstance(said, _Failure) else said
