"""Rewards that give no number, or raise: a counted error of exactly the samples concerned, and nothing else stops."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.unit.env.rewards.running.misbehaving import BAD, GROUP, Make, fine, fine_async


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
    ("reward", "told"),
    [
        (raises, "raises: KeyError: 'mark'"),
        (raises_async, "raises_async: KeyError: 'mark'"),
        (leaves, "leaves: SystemExit: 3"),
        (cancels_itself, "cancels_itself: CancelledError: "),
        (forgets_async, "forgets_async: it returns an awaitable but is not `async def`"),
        (group_with_a_nan, "group_with_a_nan: a reward returns a finite number or None, not nan"),
        *[
            (returning(value), f"reward: a reward returns a finite number or None, not {value!r}")
            for value in (float("nan"), float("inf"), -float("inf"), "1", [1.0], 1j)
        ],
    ],
)
async def test_the_sample_it_fails_on_is_an_error_and_the_others_are_not(
    scorer: Make, reward: Callable[..., Any], told: str
) -> None:
    made = scorer(fine, reward, fine_async)
    scores = await made.score(GROUP)
    assert [score.total for score in scores] == [3.0, None, 3.0, 3.0]
    assert [score.error for score in scores] == [None, told, None, None]
    assert scores[1].parts == {"fine": 1.0, reward.__name__: None, "fine_async": 1.0}
    assert made.errors == {reward.__name__: 1}


@pytest.mark.parametrize("value", [True, 1, np.float32(1.0), np.int64(1), np.array(1.0)])
async def test_every_kind_of_number_is_a_value(scorer: Make, value: object) -> None:
    [score] = await scorer(returning(value)).score([BAD])
    assert score.total == 1.0
    assert type(score.total) is float


async def test_an_enormous_integer_is_an_error(scorer: Make) -> None:
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
    ("reward", "told"),
    [
        (too_few, "it returned 3 values for 4 completions"),
        (too_many, "it returned 5 values for 4 completions"),
        (one_for_all, "a group-level reward returns a list, one value a completion, not 1.0"),
        (raises_for_all, "ValueError: no"),
    ],
)
async def test_a_group_level_failure_is_one_of_all_samples(scorer: Make, reward: Callable[..., Any], told: str) -> None:
    made = scorer(fine, reward)
    scores = await made.score(GROUP)
    assert [score.error for score in scores] == [f"{reward.__name__}: {told}"] * 4
    assert [score.parts["fine"] for score in scores] == [1.0] * 4
    assert made.errors == {reward.__name__: 4}


async def test_a_group_level_reward_may_give_an_array(scorer: Make) -> None:
    def array(completions: list[str]) -> Any:
        return np.arange(len(completions), dtype=np.float32)

    assert [score.total for score in await scorer(array).score(GROUP)] == [0, 1, 2, 3]
