"""Evaluates every remaining prompt of a plan, a bounded number at a time."""

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
    """Makes completions of an item and scores them, as `Roller.roll` does; the name appears in the logs."""

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
    """Evaluates the missing prompts of `file.plan`, and writes the results. Keeps finished prompts after any error.

    `decision`: the correctness reward of the rewards by which `roll` scores. Raises InferenceError when the model
    server does not answer or refuses every prompt, and RewardError when the deciding reward cannot extract an answer.
    """
    started, before = time.time(), len(file.done)
    missing = iter([number for number in range(file.plan.prompts) if number not in file.done])
    with progress:
        await together(_work(file, dataset, roll, decision, missing, progress) for _ in range(workers))
    # On a thread, because serve continues with rollouts meanwhile.
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
