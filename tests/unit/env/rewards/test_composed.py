"""Rewards made of other rewards: values, visible parts, and the cost of a failing part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill_env.errors import RewardError
from gristmill_env.rewards import Sample, Score, Scorer, WeightedReward, create_reward, registry, reward, reward_names
from gristmill_env.rewards.composed import Composed
from gristmill_env.settings.dataset import RewardSpec


@pytest.fixture(autouse=True)
def _rewards_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that return the number in the completion: "up 3" is 3 for `up`, and no value for `down`."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    def read(completion: str, word: str) -> float | None:
        words = completion.split()
        return float(words[words.index(word) + 1]) if word in words else None

    @reward("up")
    def up(completion: str) -> float | None:
        return read(completion, "up")

    @reward("down")
    async def down(completions: list[str]) -> list[float | None]:
        return [read(completion, "down") for completion in completions]


def combined(*rewards: Any, **params: Any) -> dict[str, Any]:
    return {"type": "combined", "params": {"rewards": list(rewards), **params}}


UP2 = {"type": "up", "weight": 2.0}
DOWN3 = {"type": "down", "weight": 3.0}
GROUP = ["up 1 down 10", "up 3 down 10", "up 2", "neither"]


@pytest.mark.parametrize(
    ("normalization", "values"),
    [
        ("none", [2 * 1 + 3 * 10, 2 * 3 + 3 * 10, None, None]),
        ("sum", [(2 * 1 + 3 * 10) / 5, (2 * 3 + 3 * 10) / 5, 2.0, None]),
        ("minmax", [2 * 0.0 + 3 * 0.5, 2 * 1.0 + 3 * 0.5, None, None]),
    ],
)
def test_combined_adds_weighted_parts_after_normalization(normalization: str, values: list[float | None]) -> None:
    made = create_reward(combined(UP2, DOWN3, normalization=normalization)).score(GROUP)
    assert made == [None if value is None else pytest.approx(value, rel=1e-12) for value in values]


@pytest.mark.parametrize(
    ("completions", "values"),
    [(["up -1.7e308", "up 1.7e308", "up 0"], [0, 1, 0.5]), (["up 5e-324", "up 0"], [0.5, 0.5])],
)
def test_minmax_of_enormous_and_of_tiny_values(completions: list[str], values: list[float]) -> None:
    assert create_reward(combined("up", normalization="minmax")).score(completions) == values


async def score(specification: Any, *completions: str, weight: float = 1.0) -> list[Score]:
    async with Scorer([WeightedReward(create_reward(specification), weight)], has_answer=True) as scorer:
        return await scorer.score([Sample(completion, answer="4") for completion in completions])


async def test_composed_reward_keeps_its_parts_visible_and_unweighted() -> None:
    [made] = await score(combined(UP2, {**DOWN3, "name": "fall"}), "up 1 down 10", weight=0.5)
    assert made.parts == {"combined": 32.0, "combined/up": 1.0, "combined/fall": 10.0}
    assert made.total == 16.0


async def test_composed_rewards_may_contain_composed_rewards() -> None:
    inner = {**combined(DOWN3), "name": "inner", "weight": 10.0}
    [made] = await score(combined("up", inner), "up 1 down 1")
    assert made.parts == {"combined": 31.0, "combined/up": 1.0, "combined/inner": 3.0, "combined/inner/down": 1.0}


async def test_composed_reward_fails_with_a_failing_part_that_is_not_a_metric() -> None:
    broken = "up x down 2"
    first, second = await score(combined("up", "down"), broken, "up 1 down 1")
    assert (first.total, second.total) == (None, 2.0)
    assert first.parts == {"combined": None, "combined/up": None, "combined/down": 2.0}
    assert first.failed["combined"] == first.failed["combined/up"]
    assert (first.failed["combined"].code, first.failed["combined"].values) == (
        "reward_raised",
        {"error": "ValueError"},
    )
    assert first.error == str(first.failed["combined/up"])
    [metric] = await score(combined({"type": "up", "weight": 0.0}, "down"), broken)
    assert (metric.total, metric.error) == (2.0, None)
    assert list(metric.failed) == ["combined/up"]


async def test_failed_part_does_not_affect_the_range_of_the_others() -> None:
    made = await score(combined("up", normalization="minmax"), "up x", "up 100", "up 200", "up 300")
    assert [one.total for one in made] == [None, 0.0, 0.5, 1.0]


SHAPED, RIGHT = "<answer>4</answer>", "#### 4"


def test_r1_adds_format_and_accuracy_with_their_weights() -> None:
    completions = [SHAPED, RIGHT, "<answer>5</answer>", "5"]
    assert create_reward("r1").score(completions, answer="4") == [1.5, 1.0, 0.5, 0.0]
    weights = {"format_weight": 0.25, "accuracy_weight": 2.0}
    assert create_reward("r1", weights).score(completions, answer="4") == [2.25, 2.0, 0.25, 0.0]


@pytest.mark.skipif("reasoning_steps" not in reward_names(), reason="reasoning_steps is not there yet")
async def test_cascading_r1_has_the_documented_scores_and_parts() -> None:
    steps = "\nFirst, add. Second, check. Third, done.\n"
    made = await score(
        "cascading_r1",
        f"<think>{steps}</think> #### 4",
        "<think>2 + 2</think> #### 4",
        f"<think>{steps}</think> #### 5",
        f"{steps} #### 4",
        "5",
    )
    assert [one.total for one in made] == [pytest.approx(1.1), 1.0, 0.0, 0.0, 0.0]
    assert list(made[0].parts) == [
        "cascading_r1", "cascading_r1/format", "cascading_r1/accuracy", "cascading_r1/reasoning_steps"
    ]  # fmt: skip


async def test_composed_reward_requires_the_inputs_of_its_parts() -> None:
    with raises(RewardError, "no_answer_field", reward="accuracy"):
        Scorer([WeightedReward(create_reward("r1"), 1.0)], has_answer=False)


@pytest.mark.parametrize(
    ("specification", "code", "values"),
    [
        (combined(), "parameter_invalid", {"reward": "combined", "parameter": "rewards", "problem": "too_short"}),
        (combined("up", "up"), "duplicate_name", {"reward": "combined", "names": ["up"]}),
        (combined("dow"), "unknown_reward", {"reward": "dow"}),
        (
            combined("up", normalization="max"),
            "parameter_invalid",
            {"reward": "combined", "parameter": "normalization", "problem": "literal_error"},
        ),
        (combined({"type": "up", "weight": 0}), "all_weights_zero", {"reward": "combined"}),
        (combined({"type": "up", "weight": -1}, normalization="sum"), "negative_weight", {"reward": "combined"}),
        ({"type": "combined"}, "parameter_missing", {"reward": "combined", "parameter": "rewards"}),
        (
            {"type": "r1", "params": {"format_weight": 0, "accuracy_weight": 0}},
            "all_weights_zero",
            {"reward": "r1"},
        ),
    ],
)
def test_composed_reward_refuses_invalid_parts(specification: Any, code: str, values: dict[str, Any]) -> None:
    with raises(RewardError, code, **values):
        create_reward(specification)


async def test_whole_numbers_of_a_composed_reward_are_values() -> None:
    @reward("counts")
    class Counts(Composed):
        parts = (RewardSpec(type="up"),)

        def combine(self, parts: Mapping[str, Sequence[float | None]]) -> list[float | None]:
            return [None if value is None else int(value) for value in parts["up"]]

    async with Scorer([WeightedReward(create_reward("counts"), 1.0)], has_answer=False) as scorer:
        totals = [score.total for score in await scorer.score([Sample("up 3"), Sample("up 1")])]
    assert totals == [3.0, 1.0]
