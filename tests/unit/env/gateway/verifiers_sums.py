"""A taskset of verifiers, as a user writes one: sums, and a row whose reward fails."""

# mypy: disable-error-code="misc, untyped-decorator, import-not-found"
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumsConfig(vf.TasksetConfig):
    most: int = 6
    split: str = "train"


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.75)
    async def right(self, task: SumData, trace: Any) -> float:
        if task.answer == "fails":
            raise RuntimeError("the checker is away")
        return float(task.answer in trace.last_reply)

    @vf.reward(weight=0.25)
    async def short(self, trace: Any) -> float:
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def letters(self, trace: Any) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        shift = 100 if self.config.split == "test" else 0
        for number in range(self.config.most):
            answer = "fails" if number == 5 else str(2 * (number + shift))
            prompt = f"What is {number + shift} + {number + shift}?"
            yield Sum(SumData(prompt=prompt, system_prompt="Be exact.", answer=answer), self.config.task)
