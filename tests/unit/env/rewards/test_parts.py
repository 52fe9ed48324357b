"""A reward may report the parts of its value."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill_env.rewards import RewardResult, Sample, Scorer, WeightedReward, create_reward

SAMPLES = [Sample("a"), Sample("bb"), Sample("ccc")]


async def test_reward_parts_are_reported_and_do_not_count() -> None:
    def sizes(completion: str) -> RewardResult:
        return RewardResult(len(completion) * 2.0, {"letters": len(completion), "nothing": None})

    async with Scorer([WeightedReward(create_reward(sizes), 0.5)], has_answer=False) as scorer:
        scores = await scorer.score(SAMPLES)
    assert [score.total for score in scores] == [1, 2, 3]
    assert scores[1].parts == {"sizes": 4, "sizes/letters": 2, "sizes/nothing": None}


async def test_failing_reward_part_is_counted_and_the_value_is_kept() -> None:
    def sizes(completions: list[str]) -> list[RewardResult | None]:
        odd = [ValueError("no vowel") if text == "bb" else 1.0 for text in completions]
        return [
            None if text == "a" else RewardResult(1.0, {"vowels": part})
            for text, part in zip(completions, odd, strict=True)
        ]

    async with Scorer([WeightedReward(create_reward(sizes), 1.0)], has_answer=False) as scorer:
        nothing, failed, good = await scorer.score(SAMPLES)
        assert scorer.errors == {"sizes/vowels": 1}
    assert (nothing.total, dict(nothing.parts)) == (None, {"sizes": None, "sizes/vowels": None})
    assert (failed.total, failed.error, list(failed.failed)) == (1.0, None, ["sizes/vowels"])
    assert failed.failed["sizes/vowels"].code == "reward_raised"
    assert failed.failed["sizes/vowels"].values == {"error": "ValueError"}
    assert (good.total, good.parts["sizes/vowels"]) == (1.0, 1.0)


async def test_reward_value_that_is_not_a_number_is_an_error_with_its_parts() -> None:
    def sizes(completion: str) -> RewardResult:
        return RewardResult(float("nan"), {"letters": len(completion)})

    async with Scorer([WeightedReward(create_reward(sizes), 1.0)], has_answer=False) as scorer:
        (score,) = await scorer.score(SAMPLES[:1])
    assert score.failed["sizes"].code == "value_invalid"
    assert score.error == str(score.failed["sizes"])
    assert (score.total, score.parts["sizes"], score.parts["sizes/letters"]) == (None, None, 1)


@pytest.mark.parametrize("parts", [None, [1.0], 0.5, {1: 0.5}, "ab"])
async def test_reward_parts_without_names_are_an_error_of_the_reward(parts: Any) -> None:
    def sizes(completion: str) -> RewardResult:
        return RewardResult(1.0, parts)

    async with Scorer([WeightedReward(create_reward(sizes), 1.0)], has_answer=False) as scorer:
        (score,) = await scorer.score(SAMPLES[:1])
    assert (score.total, score.failed["sizes"].code) == (None, "value_invalid")


def test_score_returns_the_value_of_a_reward_with_parts() -> None:
    def sizes(completion: str) -> RewardResult:
        return RewardResult(len(completion), {"letters": 0.0})

    assert create_reward(sizes).score(["ab", ""]) == [2.0, 0.0]
