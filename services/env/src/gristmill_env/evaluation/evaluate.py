"""The work itself: every prompt of a plan that is not done yet, a bounded number at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from typing import Protocol

from gristmill import SamplingParams
from gristmill_env.data import Item, PromptDataset
from gristmill_env.drops import ROW_ERRORS, reason_of
from gristmill_env.evaluation.progress import EvaluationProgress
from gristmill_env.evaluation.records import PromptRecord, answered, skipped
from gristmill_env.evaluation.results import Evaluated, write_results
from gristmill_env.evaluation.samples import SampleFile
from gristmill_env.evaluation.summary import summarise
from gristmill_env.rewards import Decision
from gristmill_env.rollout import Rollout
from gristmill_env.together import together


class Roll(Protocol):
    """Makes completions of an item and scores them, as `Roller.roll` does; the name stands in the logs."""

    def __call__(self, item: Item, name: str, *, sampling: SamplingParams, count: int) -> Awaitable[Rollout]: ...


async def evaluate(
    file: SampleFile,
    dataset: PromptDataset,
    roll: Roll,
    *,
    decision: Decision,
    workers: int,
    progress: EvaluationProgress,
) -> Evaluated:
    """Do what is missing of `file.plan`, and write the results. What is done is kept, however this ends.

    `decision`: of the rewards that `roll` scores by. Raises InferenceError when the model server does not answer, or
    refuses every prompt, and RewardError when the deciding reward cannot say what a completion states.
    """
    started, before = time.time(), len(file.done)
    missing = iter([number for number in range(file.plan.prompts) if number not in file.done])
    with progress:
        await together(_work(file, dataset, roll, decision, missing, progress) for _ in range(workers))
    # On a thread: serve goes on with rollouts meanwhile.
    return await asyncio.to_thread(_conclude, file, started, before)


def _conclude(file: SampleFile, started: float, resumed: int) -> Evaluated:
    summary = summarise(file.plan, file.finish())
    evaluated = Evaluated(file.plan, summary, file.folder, started=started, ended=time.time(), resumed=resumed)
    write_results(evaluated)
    return evaluated


async def _work(
    file: SampleFile,
    dataset: PromptDataset,
    roll: Roll,
    decision: Decision,
    missing: Iterator[int],
    progress: EvaluationProgress,
) -> None:
    for number in missing:  # shared: each number goes to one worker
        record = await _ask(file, dataset, roll, decision, number)
        await file.add(record)
        progress.add(sum(sample.tokens or 0 for sample in record.samples))


async def _ask(file: SampleFile, dataset: PromptDataset, roll: Roll, decision: Decision, number: int) -> PromptRecord:
    try:
        item, plan = dataset.item(number), file.plan
        rollout = await roll(item, f"e{number:06d}", sampling=plan.sampling, count=plan.samples)
    except ROW_ERRORS as error:
        return skipped(number, reason_of(error), str(error))
    return answered(number, rollout, decision)
