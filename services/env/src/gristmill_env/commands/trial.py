"""Constructed completions of a run's rows, and a trial of all rewards on them, for `check` and `doctor`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gristmill_env.data import Item
from gristmill_env.rewards import Sample, Scorer
from gristmill_env.session import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS = 100
_SECONDS = 20.0
"""A trial begins no further row after this time, because a reward may ask a judge."""


@dataclass(frozen=True)
class Trial:
    """The results of a trial."""

    rows: int
    """Rows on whose completions the rewards were called."""
    ran: Sequence[str]
    """Rewards that gave a value for at least one completion."""
    silent: Sequence[str]
    """Rewards that gave no value and did not fail."""
    failed: Mapping[str, Mapping[int, str]]
    """The first error of each failed reward on each row, by the row's index in the data set."""


async def try_rewards(task: Task, items: Sequence[Item], tokenizer: PreTrainedTokenizerBase | None) -> Trial:
    """Calls every reward on four constructed completions of each row. Raises RewardError if one hangs too often."""
    failed: dict[str, dict[int, str]] = {}
    values: set[str] = set()
    rows, began = 0, time.monotonic()
    has_answer = task.dataset.answer_column is not None
    async with Scorer(
        task.scorer.rewards, has_answer=has_answer, columns=task.dataset.columns, execution=task.scorer.execution
    ) as scorer:
        for item, other in zip(items, [*items[1:], *items[:1]], strict=True):
            if rows == _ROWS or time.monotonic() - began > _SECONDS:
                break
            rows += 1
            for score in await scorer.score(constructed(item, other, tokenizer)):
                values |= {name for name, value in score.parts.items() if value is not None}
                for name, failure in score.failed.items():
                    failed.setdefault(name, {}).setdefault(item.index, str(failure))
    names = task.scorer.names
    silent = [name for name in names if rows and name not in values and name not in failed]
    return Trial(rows, [name for name in names if name in values], silent, failed)


def constructed(item: Item, other: Item, tokenizer: PreTrainedTokenizerBase | None) -> list[Sample]:
    """Returns a group of four completions of one row: right, wrong, without an answer, and empty."""
    right, wrong = item.answer or item.prompt, other.answer or other.prompt
    texts = [f"<think>\nI add.\n</think>\n\n<answer>{right}</answer>", f"\\boxed{{{wrong}}}", "I do not know.", ""]
    return [
        Sample.of(
            item,
            text,
            tokens=[] if tokenizer is None else list(tokenizer(text, add_special_tokens=False)["input_ids"]),
            episode_reward=0.5,
        )
        for text in texts
    ]
