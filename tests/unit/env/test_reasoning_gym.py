"""Rows and scores of the real package reasoning-gym, as a run reads them."""

from __future__ import annotations

import importlib.util
from itertools import islice
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill_env.adapters import reasoning_gym as adapter
from gristmill_env.data.dataset import PromptDataset
from gristmill_env.errors import DatasetError, EpisodeError
from gristmill_env.rewards import Sample, Scorer, WeightedReward, create_reward
from gristmill_env.settings.dataset import DatasetConfig

pytestmark = pytest.mark.slow

MODULE = "gristmill_env.adapters.reasoning_gym"
TASKS = {"chain_sum": {"max_terms": 3}, "leg_counting": None, "basic_arithmetic": {}, "spell_backward": {}}


def dataset(split: str, **params: Any) -> PromptDataset:
    params = {"tasks": TASKS, **params}
    return PromptDataset(DatasetConfig(rows=f"{MODULE}:rows", rows_params=params, split=split), None)


def test_rows_of_a_split_are_the_same_at_each_start_and_those_of_another_differ() -> None:
    first, again, test = (dataset(split) for split in ("train[:40]", "train[:40]", "test[:40]"))
    prompts = [[one.item_at(index).prompt for index in range(40)] for one in (first, again, test)]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0]) & set(prompts[2])) < 8, "small sums may be equal by chance"
    assert {first.item_at(index).columns["task"] for index in range(40)} == set(TASKS)
    assert dataset("train[:40]", seed=1).item_at(0).prompt != prompts[0][0]


def test_rows_end_with_the_questions_of_a_task() -> None:
    assert len(dataset("train", tasks={"chain_sum": None}, size=7)) == 7
    assert len(dataset("train", tasks={"chain_sum": {"size": 3}})) == 3


async def test_score_is_the_tasks_own() -> None:
    rows = dataset("train[:20]")
    reward = create_reward(f"{MODULE}:score")
    async with Scorer([WeightedReward(reward, 1.0)], has_answer=False, columns=rows.columns) as scorer:
        for index in range(20):
            item = rows.item_at(index)
            right = f"Hm, <answer>1</answer>? <answer> {item.columns['answer']} </answer>"
            scores = await scorer.score([Sample.of(item, text) for text in (right, "<answer>x</answer>", "no tags")])
            assert scores[0].total == 1.0, item
            assert scores[1].total is not None
            assert scores[1].total < 0.2
            assert scores[2].total == 0.0


def test_entry_that_is_made_again_is_the_same() -> None:
    for row in islice(adapter.rows(tasks={"countdown": None, "mini_sudoku": None, "maze": None}), 12):
        adapter._made.cache_clear()
        adapter._generator.cache_clear()
        _, made = adapter._made(row["task"], row["entry"]["options"], row["entry"]["index"])
        assert (made["question"], made["answer"]) == (row["prompt"], row["answer"])


def test_unknown_task_and_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(DatasetError, "unknown_task", task="chain_sun"):
        next(adapter.rows(tasks={"chain_sun": None}))
    with raises(DatasetError, "rows_failed") as failed:
        dataset("train[:2]", tasks={"chain_sum": {"max_therms": 2}})
    assert "max_therms" in str(failed.value)
    adapter._generator.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(EpisodeError, "package_missing", extra="reasoning-gym"):
        dataset("train[:2]", tasks={"chain_sum": None})
