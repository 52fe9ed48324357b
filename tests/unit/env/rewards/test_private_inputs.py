"""Rewards get copies: a change by one reward does not reach the row, other rewards or later calls."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from gristmill_env.data import Item, Message
from gristmill_env.environments import Environment, EnvironmentFactory, EnvironmentRunner, Reply, StepResult
from gristmill_env.rewards import Sample, Scorer, WeightedReward, create_reward, reward
from gristmill_env.values import private

ROW: dict[str, Any] = {
    "level": "hard", "tests": ["a", "b"], "info": {"keys": [{"deep": 1}], "array": np.arange(3)}, "answer": "5"
}  # fmt: skip
MESSAGES = ({"role": "user", "content": "?"},)


def spoils_row(row: dict[str, Any]) -> float:
    seen = len(row["tests"])
    row["tests"].clear()
    row["info"]["keys"][0]["deep"] = 2
    row["info"]["array"][0] = 9
    row["level"] = "easy"
    return float(seen)


def spoils_column(tests: list[str], info: dict[str, Any]) -> float:
    tests.append("c")
    info.clear()
    return float(len(tests))


def spoils_rows(completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
    seen = [float(len(row["tests"])) for row in rows]
    for row in rows:
        row["tests"].append("d")
    return seen


def spoils_messages(messages: Sequence[dict[str, Any]], conversation: Sequence[dict[str, Any]]) -> float:
    for message in (*messages, *conversation):
        message["content"] += "!"
    return float(len(messages[0]["content"]))


def spoils_tokens(tokens: list[int]) -> float:
    tokens.append(1)
    return float(len(tokens))


def spoils_for_trl(completions: list[str], tests: list[list[str]], **kwargs: Any) -> list[float]:
    seen = [float(len(item)) for item in tests]
    for item in tests:
        item.append("e")
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (spoils_row, 2.0), (spoils_column, 3.0), (spoils_rows, 2.0), (spoils_messages, 2.0), (spoils_tokens, 3.0),
        ({"type": f"trl:{__name__}:spoils_for_trl"}, 2.0),
    ],
)  # fmt: skip
async def test_changes_by_a_reward_do_not_reach_other_calls(function: Any, expected: float) -> None:
    samples = [
        Sample(str(n), answer="5", row=ROW, messages=MESSAGES, conversation=MESSAGES, tokens=[1, 2]) for n in range(3)
    ]
    before, messages = copy.deepcopy(ROW), copy.deepcopy(MESSAGES)
    rewards = [WeightedReward(create_reward(function, name=name), 1.0) for name in ("one", "other")]
    async with Scorer(rewards, has_answer=True, columns=list(ROW)) as scorer:
        for _ in range(2):
            for score in await scorer.score(samples):
                assert score.parts == {"one": expected, "other": expected}
    assert np.array_equal(ROW["info"].pop("array"), before["info"].pop("array"))
    assert before == ROW
    ROW["info"]["array"] = np.arange(3)
    assert messages == MESSAGES
    assert [sample.tokens for sample in samples] == [[1, 2]] * 3


def test_extract_answer_function_gets_a_copy_of_the_row() -> None:
    def states(completion: str, row: Mapping[str, Any]) -> str | None:
        row["tests"].clear()
        return "x"

    @reward("spoils_stated", extract_answer=states)
    def right(completion: str) -> float:
        return 1.0

    row = {"tests": ["a"]}
    assert create_reward("spoils_stated").extracted("", row) == "x"
    assert row == {"tests": ["a"]}


async def test_environments_of_a_group_get_separate_items() -> None:
    class Spoils(Environment):
        def reset(self, item: Item) -> Sequence[Message]:
            seen = len(item.columns["tests"])
            item.columns["tests"].append("c")
            return [{"role": "user", "content": str(seen)}]

        def step(self, reply: Reply) -> StepResult:
            return StepResult.end()

    item = Item(row=0, index=0, prompt="?", answer=None, columns={"tests": ["a", "b"]})
    async with EnvironmentRunner(EnvironmentFactory(Spoils), 60) as environments:
        openings = [await environments.opening(item) for _ in range(3)]
    assert [opening.messages[0]["content"] for opening in openings] == ["2", "2", "2"]
    assert item.columns["tests"] == ["a", "b"]


def test_objects_that_cannot_be_copied_are_shared() -> None:
    class Stubborn:
        def __deepcopy__(self, memo: object) -> Stubborn:
            raise TypeError("one of a kind")

    stubborn = Stubborn()
    copied = private({"it": stubborn, "list": [stubborn]})
    assert copied["it"] is stubborn
    assert copied["list"] == [stubborn]
