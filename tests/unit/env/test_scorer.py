"""Registry and scorer: what may be configured, and what becomes of a reward that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from gristmill_env.errors import RewardError
from gristmill_env.rewards import Sample, Scorer, WeightedReward, create_reward, registry, reward
from gristmill_env.rewards.registry import Reward


def custom(function: Callable[..., float | None], *inputs: str, name: str = "custom") -> Reward:
    return Reward(name, inputs, function)


def scorer(*rewards: tuple[Reward, float]) -> Scorer:
    return Scorer([WeightedReward(reward, weight) for reward, weight in rewards], has_answer=True)


def test_the_total_is_the_weighted_sum_and_the_parts_stay_unweighted() -> None:
    score = scorer((create_reward("format"), 0.2), (create_reward("accuracy"), 0.8)).score(
        Sample("<answer>25</answer>", answer="26")
    )
    assert score.total == pytest.approx(0.2, abs=1e-12)
    assert score.parts == {"format": 1.0, "accuracy": 0.0}
    assert score.error is None


def test_a_part_without_a_value_leaves_the_sum() -> None:
    score = scorer((create_reward("format"), 0.2), (create_reward("accuracy"), 0.8)).score(
        Sample("<answer>25</answer>", answer="Paris")
    )
    assert score.total == pytest.approx(0.2, abs=1e-12)
    assert score.parts == {"format": 1.0, "accuracy": None}


def test_no_value_at_all_is_no_score() -> None:
    score = scorer((create_reward("accuracy"), 1.0)).score(Sample("25", answer="Paris"))
    assert score.total is None
    assert score.error is None


def explode(completion: str) -> float:
    raise KeyError("mark")


@pytest.mark.parametrize(
    "bad",
    [explode, lambda completion: float("nan"), lambda completion: float("inf"), lambda completion: "1", lambda: 1.0],
)
def test_a_failing_reward_is_an_error_and_never_a_zero(
    bad: Callable[..., float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        score = scorer((create_reward("format"), 1.0), (custom(bad, "completion"), 1.0)).score(
            Sample("<answer>1</answer>")
        )
    assert score.total is None
    assert score.parts == {"format": 1.0, "custom": None}
    assert score.error is not None
    assert score.error.startswith("custom: ")
    assert "custom" in caplog.text


def test_a_reward_of_weight_zero_is_a_metric() -> None:
    score = scorer((create_reward("format"), 0.0), (custom(lambda completion: 3.0, "completion"), 1.0)).score(
        Sample("<answer>1</answer>")
    )
    assert score.total == 3.0
    assert score.parts["format"] == 1.0


def test_a_reward_gets_what_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    @reward("declares_for_a_test")
    def declares(row: dict[str, str], tokens: list[int], *, scale: float = 1.0) -> float:
        return scale * len(tokens) * len(row["topic"])

    made = create_reward("declares_for_a_test", {"scale": 2.0})
    assert made.score(Sample("", tokens=[1, 2, 3], row={"topic": "ab"})) == 12.0
    assert not made.needs_answer


def test_a_reward_that_asks_for_what_no_sample_has_cannot_be_registered() -> None:
    def asks(completoin: str) -> float:
        return 0.0

    with pytest.raises(RewardError, match=r"asks for 'completoin'.*Did you mean 'completion'\?"):
        reward("asks_for_a_test")(asks)


def test_two_rewards_cannot_have_one_name() -> None:
    with pytest.raises(RewardError, match=r"'length' is registered twice.*rewards\.length"):
        reward("length")(lambda completion: 0.0)


def test_an_unknown_reward_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(RewardError, match=r"no reward 'lenght'.*accuracy, .*format, length.*Did you mean 'length'\?"):
        create_reward("lenght")


def test_an_unknown_parameter_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(RewardError, match=r"'length' has no parameter 'target'.*target_tokens.*'target_tokens'\?"):
        create_reward("length", {"target": 10})


@pytest.mark.parametrize("value", [0, -1, "many"])
def test_a_parameter_of_another_kind_is_refused(value: object) -> None:
    with pytest.raises(RewardError, match="parameter 'target_tokens' of reward 'length'"):
        create_reward("length", {"target_tokens": value})


def test_a_reward_that_compares_needs_an_answer_field() -> None:
    with pytest.raises(RewardError, match=r"'accuracy'.*set dataset\.answer_field"):
        Scorer([WeightedReward(create_reward("accuracy"), 1.0)], has_answer=False)
    Scorer([WeightedReward(create_reward("length"), 1.0)], has_answer=False)


def test_a_run_needs_a_reward_and_each_once() -> None:
    with pytest.raises(RewardError, match="reward_functions is empty"):
        scorer()
    with pytest.raises(RewardError, match="lists length twice"):
        scorer((create_reward("length"), 1.0), (create_reward("length"), 2.0))
