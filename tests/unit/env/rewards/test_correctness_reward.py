"""Which reward is the correctness reward: one rule, for evaluations and for W&B."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill_env.rewards import correctness_reward, create_reward


def judge(completion: str, ground_truth: str) -> float:
    return 1.0


def judges(completions: list[str], answers: list[str]) -> list[float]:
    return [1.0] * len(completions)


COSINE = {"type": "cosine_scaled", "params": {"base_url": "http://localhost:1"}}
COMBINED = {
    "type": "combined",
    "params": {"rewards": ["length", {"type": "accuracy", "weight": 0.5}, {"type": "format", "weight": 0.2}]},
}
NESTED = {"type": "combined", "name": "outer", "params": {"rewards": ["format", COMBINED]}}


@pytest.mark.parametrize(
    ("rewards", "name", "compares"),
    [
        (["format", "accuracy"], "accuracy", True),
        (["format", judge], "judge", True),  # `ground_truth` is another name of `answer`
        (["format", judges], "judges", True),
        ([COSINE, "accuracy"], "accuracy", True),
        ([COSINE, {"type": "mcq", "name": "right"}], "right", True),
        ([COSINE], "cosine_scaled", True),
        ([judge, COSINE], "judge", True),
        ([judge, "accuracy"], "accuracy", True),
        (["mcq", "accuracy"], "mcq", True),
        (["r1"], "r1/accuracy", True),
        (["cascading_r1"], "cascading_r1/accuracy", True),
        ([COMBINED], "combined/accuracy", True),
        (["length", NESTED], "outer/combined/accuracy", True),
        (["length", "format"], "length", False),
        ([{"type": "combined", "params": {"rewards": ["length", "format"]}}], "combined", False),
    ],
)
def test_correctness_reward_is_the_first_comparing_reward(rewards: list[Any], name: str, compares: bool) -> None:
    correctness = correctness_reward([create_reward(one) for one in rewards])
    assert (correctness.name, correctness.compares) == (name, compares)


def test_score_of_1_or_more_up_to_rounding_counts_as_right() -> None:
    correctness = correctness_reward([create_reward("accuracy")])
    assert [correctness.is_right(value) for value in (1.0, 1.1, 0.1 * 3 + 0.7, 0.999, 0.0, None)] == [
        True, True, True, False, False, None,
    ]  # fmt: skip
