"""Rewards that return no number, or raise: exactly the affected samples get a counted error, and nothing else stops."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.unit.env.rewards.running.misbehaving import BAD, GROUP, Make, fine, fine_async

from gristmill_env.errors import RewardError

pytestmark = pytest.mark.slow


def returning(value: object) -> Callable[[str], object]:
    def reward(completion: str) -> object:
        return value if completion == "bad" else 1.0

    return reward


def raises(completion: str) -> float:
    if completion == "bad":
        raise KeyError("mark")
    return 1.0


def leaves(completion: str) -> float:
    if completion == "bad":
        sys.exit(3)
    return 1.0


def refuses(completion: str) -> float:
    if completion == "bad":
        raise RewardError("picture_missing", "no picture", path="a.png")
    return 1.0


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raises_mute(completion: str) -> float:
    if completion == "bad":
        raise MuteError
    return 1.0


async def raises_async(completion: str) -> float:
    await asyncio.sleep(0)
    return raises(completion)


async def cancels_itself(completion: str) -> float:
    if completion == "bad":
        raise asyncio.CancelledError
    return 1.0


def forgets_async(completion: str) -> object:
    return fine_async(completion) if completion == "bad" else 1.0


def group_with_a_nan(completions: list[str]) -> list[float]:
    return [float("nan") if completion == "bad" else 1.0 for completion in completions]


@pytest.mark.parametrize(
    ("reward", "code", "values"),
    [
        (raises, "reward_raised", {"error": "KeyError"}),
        (raises_async, "reward_raised", {"error": "KeyError"}),
        (raises_mute, "reward_raised", {"error": "MuteError"}),
        (leaves, "reward_raised", {"error": "SystemExit"}),
        (cancels_itself, "reward_raised", {"error": "CancelledError"}),
        (refuses, "picture_missing", {"path": "a.png"}),
        (forgets_async, "not_async", {}),
        (group_with_a_nan, "value_invalid", {}),
        *[
            (returning(value), "value_invalid", {})
            for value in (float("nan"), float("inf"), -float("inf"), "1", [1.0], 1j)
        ],
    ],
)
async def test_failing_reward_gives_an_error_only_for_its_sample(
    scorer: Make, reward: Callable[..., Any], code: str, values: dict[str, str]
) -> None:
    made = scorer(fine, reward, fine_async)
    scores = await made.score(GROUP)
    assert [score.total for score in scores] == [3.0, None, 3.0, 3.0]
    failure = scores[1].failed[reward.__name__]
    assert (failure.code, failure.values) == (code, values)
    assert [score.error for score in scores] == [None, str(failure), None, None]
    assert scores[1].parts == {"fine": 1.0, reward.__name__: None, "fine_async": 1.0}
    assert made.errors == {reward.__name__: 1}


@pytest.mark.parametrize("value", [True, 1, np.float32(1.0), np.int64(1), np.array(1.0)])
async def test_reward_value_may_be_any_kind_of_number(scorer: Make, value: object) -> None:
    [score] = await scorer(returning(value)).score([BAD])
    assert score.total == 1.0
    assert type(score.total) is float


async def test_reward_value_of_an_enormous_integer_is_an_error(scorer: Make) -> None:
    [score] = await scorer(returning(10**400)).score([BAD])
    assert score.error is not None


def too_few(completions: list[str]) -> list[float]:
    return [1.0] * (len(completions) - 1)


def too_many(completions: list[str]) -> list[float]:
    return [1.0] * (len(completions) + 1)


def one_for_all(completions: list[str]) -> float:
    return 1.0


async def raises_for_all(completions: list[str]) -> list[float]:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("reward", "code", "values"),
    [
        (too_few, "value_count", {"values": 3, "completions": 4}),
        (too_many, "value_count", {"values": 5, "completions": 4}),
        (one_for_all, "not_a_list", {}),
        (raises_for_all, "reward_raised", {"error": "ValueError"}),
    ],
)
async def test_failing_group_reward_gives_an_error_for_all_samples(
    scorer: Make, reward: Callable[..., Any], code: str, values: dict[str, Any]
) -> None:
    made = scorer(fine, reward)
    scores = await made.score(GROUP)
    failures = [score.failed[reward.__name__] for score in scores]
    assert [(failure.code, failure.values) for failure in failures] == [(code, values)] * 4
    assert [score.error for score in scores] == [str(failure) for failure in failures]
    assert [score.parts["fine"] for score in scores] == [1.0] * 4
    assert made.errors == {reward.__name__: 4}


async def test_a_group_level_reward_may_give_an_array(scorer: Make) -> None:
    def array(completions: list[str]) -> Any:
        return np.arange(len(completions), dtype=np.float32)

    assert [score.total for score in await scorer(array).score(GROUP)] == [0, 1, 2, 3]
