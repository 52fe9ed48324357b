"""The scorer: weights, outcomes, and which configurations it refuses."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill_env.errors import RewardError
from gristmill_env.rewards import Reward, Sample, Scorer, WeightedReward, create_reward

Make = Callable[..., Scorer]


@pytest.fixture
async def scorer() -> AsyncIterator[Make]:
    """Makes a scorer of (reward, weight) pairs, which is closed at the end."""
    made: list[Scorer] = []

    def make(*rewards: tuple[Reward, float], **options: Any) -> Scorer:
        weighted = [WeightedReward(reward, weight) for reward, weight in rewards]
        made.append(Scorer(weighted, **{"has_answer": True, **options}))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def hopeless(completion: str) -> float:
    raise KeyError("verdict")


PART = {"type": f"{__name__}:hopeless"}


def custom(function: Callable[..., Any], name: str = "custom") -> Reward:
    return create_reward(function, name=name)


async def test_scorer_total_is_the_weighted_sum_of_unweighted_parts(scorer: Make) -> None:
    made = scorer((create_reward("format"), 0.2), (create_reward("accuracy"), 0.8))
    [score] = await made.score([Sample("<answer>25</answer>", answer="26")])
    assert score.total == pytest.approx(0.2, abs=1e-12)
    assert score.parts == {"format": 1.0, "accuracy": 0.0}
    assert score.error is None


async def test_scorer_returns_one_score_per_sample_in_order(scorer: Make) -> None:
    made = scorer((create_reward("format"), 1.0))
    scores = await made.score([Sample("<answer>1</answer>"), Sample("1"), Sample("<answer>2</answer>")])
    assert [score.total for score in scores] == [1.0, 0.0, 1.0]
    assert await made.score([]) == []


async def test_score_leaves_out_a_part_without_a_value(scorer: Make) -> None:
    made = scorer((create_reward("format"), 0.2), (custom(lambda completion: None), 0.8))
    [score] = await made.score([Sample("<answer>25</answer>")])
    assert score.total == pytest.approx(0.2, abs=1e-12)
    assert score.parts == {"format": 1.0, "custom": None}


async def test_completion_without_a_value_that_others_of_its_group_have_gets_no_total(scorer: Make) -> None:
    judge = custom(lambda completion: None if "?" in completion else 0.3, "judge")
    nobody = custom(lambda completion: None, "nobody")
    metric = custom(lambda completion: None if "!" in completion else 0.0, "metric")
    made = scorer((create_reward("format"), 0.2), (judge, 1.0), (nobody, 1.0), (metric, 0.0))
    samples = [Sample("<answer>1</answer>"), Sample("<answer>?</answer>"), Sample("<answer>1!</answer>")]
    scores = await made.score(samples)
    assert [score.total for score in scores] == [pytest.approx(0.5), None, pytest.approx(0.5)]
    assert [score.error for score in scores] == [None, None, None]
    combined = create_reward({"type": "combined", "params": {"rewards": ["format", "accuracy"]}})
    values = [score.total for score in await scorer((combined, 1.0)).score([Sample("1", answer="no")] * 2)]
    assert values == [0.0, 0.0]


async def test_scorer_without_any_value_gives_no_score(scorer: Make) -> None:
    made = scorer((custom(lambda completion: None), 1.0), (create_reward("format"), 0.0))
    [score] = await made.score([Sample("<answer>1</answer>")])
    assert score.total is None  # the value of a metric is not a score
    assert score.error is None


@pytest.mark.slow
async def test_weights_hold_to_a_billionth(scorer: Make) -> None:
    draw = random.Random(4)
    for _ in range(50):
        weights = [draw.uniform(-1e6, 1e6) for _ in range(7)]
        values = [draw.uniform(-1e6, 1e6) for _ in range(7)]
        rewards = [
            (custom(lambda completion, value=value: value, f"r{n}"), weight)
            for n, (value, weight) in enumerate(zip(values, weights, strict=True))
        ]
        [score] = await scorer(*rewards).score([Sample("")])
        expected = math.fsum(map(math.prod, zip(weights, values, strict=True)))
        assert score.total == pytest.approx(expected, rel=1e-9)
    tenths = [(custom(lambda completion: 1.0, f"r{n}"), 0.1) for n in range(10)]
    [score] = await scorer(*tenths).score([Sample("")])
    assert score.total == 1.0  # a plain sum of ten tenths is not 1


async def test_a_sum_that_overflows_is_an_error(scorer: Make) -> None:
    [score] = await scorer((custom(lambda completion: 1e308), 10.0)).score([Sample("")])
    assert score.total is None
    assert score.error is not None


async def test_reward_of_weight_zero_counts_as_a_metric(scorer: Make) -> None:
    made = scorer((create_reward("format"), 0.0), (custom(lambda completion: 3.0), 1.0))
    [score] = await made.score([Sample("<answer>1</answer>")])
    assert score.total == 3.0
    assert score.parts["format"] == 1.0


async def test_scorer_counts_a_failing_metric_and_keeps_the_score(scorer: Make) -> None:
    made = scorer((custom(lambda completion: 1 / 0, "metric"), 0.0), (custom(lambda completion: 3.0), 1.0))
    [score] = await made.score([Sample("")])
    assert (score.total, score.error) == (3.0, None)
    assert list(score.failed) == ["metric"]
    assert (score.failed["metric"].code, score.failed["metric"].values) == (
        "reward_raised", {"error": "ZeroDivisionError"}
    )  # fmt: skip
    assert made.errors == {"metric": 1}


async def test_scorer_logs_the_first_error_of_a_reward_and_counts_the_others(
    scorer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = scorer((custom(lambda completion: 1 / 0, "broken"), 1.0), (custom(lambda completion: [][0], "other"), 1.0))
    with caplog.at_level(logging.ERROR):
        for _ in range(25):
            await made.score([Sample("")] * 10)
    assert made.errors == {"broken": 250, "other": 250}
    told = [record for record in caplog.records if "'broken'" in record.getMessage()]
    assert [bool(record.exc_info) for record in told] == [True, False, False]  # 1, 10, 100
    assert " 100 " in told[-1].getMessage()
    assert len(caplog.records) == 6


def fails_on(share: float) -> Reward:
    """A reward that fails on the first completions of every ten."""

    def flaky(completion: str) -> float:
        if int(completion) % 10 < 10 * share:
            raise ValueError(f"no verdict\non {completion}")
        return 1.0

    return custom(flaky, "flaky")


async def scored(made: Scorer, completions: int) -> None:
    for first in range(0, completions, 4):
        await made.score([Sample(str(number)) for number in range(first, first + 4)])


async def test_a_reward_that_fails_on_more_than_the_limit_ends_the_run_with_its_error(scorer: Make) -> None:
    made = scorer((create_reward("format"), 1.0), (fails_on(0.6), 1.0), failure_limit=0.5)
    await scored(made, 60)
    with raises(RewardError, "too_many_failures", reward="flaky", failures=40, last="reward_raised"):
        await scored(made, 4)


@pytest.mark.parametrize(
    ("share", "options", "weight"),
    [(0.4, {"failure_limit": 0.5}, 1.0), (1.0, {}, 1.0), (1.0, {"failure_limit": 0.5}, 0.0)],
)
async def test_failures_below_the_limit_or_of_a_metric_do_not_end_the_run(
    scorer: Make, share: float, options: dict[str, float], weight: float
) -> None:
    await scored(scorer((create_reward("format"), 1.0), (fails_on(share), weight), **options), 200)


async def test_old_failures_do_not_count(scorer: Make) -> None:
    made = scorer((fails_on(0.1), 1.0), failure_limit=0.5)
    for number in [0] * 32 + [5] * 64 + [0] * 32:
        await made.score([Sample(str(number))])
    with raises(RewardError, "too_many_failures", failures=33):
        await made.score([Sample("0")])


@pytest.mark.slow
async def test_a_part_that_fails_is_named_in_the_error_of_its_reward(scorer: Make) -> None:
    made = scorer((create_reward({"type": "combined", "params": {"rewards": [PART]}}), 1.0), failure_limit=0.5)
    values = {"reward": "combined", "failures": 64, "failed": "combined/hopeless"}
    with raises(RewardError, "too_many_failures", **values) as raised:
        await scored(made, 64)
    assert "KeyError: 'verdict'" in str(raised.value)


async def test_scorer_warns_about_failures_once_per_64_completions(
    scorer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = scorer((fails_on(0.1), 1.0), failure_limit=0.5)

    def warned() -> int:
        return sum(record.levelno == logging.WARNING for record in caplog.records)

    await scored(made, 28)
    assert warned() == 0
    await scored(made, 64)
    assert warned() == 1
    await scored(made, 64)
    assert warned() == 2


@pytest.mark.slow
async def test_answers_never_mix_between_concurrent_groups(scorer: Make) -> None:
    """Every reward gets its own group's answer and its own completion, whatever the interleaving."""
    draw = random.Random(9)

    async def judged(completion: str, answer: str) -> float:
        await asyncio.sleep(draw.random() / 100)
        return float(f"{completion}" == f"the answer is {answer}")

    def same_row(completions: list[str], answer: str, row: dict[str, str]) -> list[float]:
        return [float(answer == row["gold"] and completion.endswith(answer)) for completion in completions]

    def number(completion: str, answer: str) -> float:
        return float(answer)

    made = scorer(
        (create_reward("accuracy"), 1.0),
        (create_reward(judged), 1.0),
        (create_reward(same_row), 1.0),
        (create_reward(number), 1.0),
        columns=["gold"],
    )

    async def group(answer: str) -> None:
        samples = [Sample(f"the answer is {answer}", answer=answer, row={"gold": answer}) for _ in range(4)]
        for score in await made.score(samples):
            assert score.parts == {"accuracy": 1.0, "judged": 1.0, "same_row": 1.0, "number": float(answer)}

    async with asyncio.TaskGroup() as tasks:
        for answer in range(200):
            tasks.create_task(group(str(answer)))


async def test_scorer_uses_one_instance_of_a_reward_class_per_run(scorer: Make) -> None:
    class Counting:
        def __init__(self, *, start: int = 0) -> None:
            self.numbers = itertools.count(start)

        def __call__(self, completion: str) -> float:
            return next(self.numbers)

    made = scorer((create_reward(Counting, {"start": 5}), 1.0))
    totals = [score.total for _ in range(3) for score in await made.score([Sample("")] * 2)]
    assert sorted(total for total in totals if total is not None) == [5, 6, 7, 8, 9, 10]


async def test_scorer_uses_one_reward_twice_under_two_names(scorer: Make) -> None:
    short = create_reward({"type": "length", "name": "short", "params": {"target_tokens": 2}})
    long = create_reward({"type": "length", "name": "long", "params": {"target_tokens": 8}})
    [score] = await scorer((short, 1.0), (long, -1.0)).score([Sample("", tokens=[1, 2, 3, 4])])
    assert score.parts == {"short": 1.0, "long": 0.5}
    assert score.total == 0.5


def built(*rewards: tuple[Reward, float], **options: Any) -> Scorer:
    return Scorer([WeightedReward(*pair) for pair in rewards], **{"has_answer": True, **options})


def test_scorer_refuses_invalid_configurations() -> None:
    length = create_reward("length")
    with raises(RewardError, "no_rewards"):
        built()
    with raises(RewardError, "all_weights_zero"):
        built((length, 0.0))
    with raises(RewardError, "duplicate_name", names=["length"]):
        built((length, 1.0), (create_reward("length"), 2.0))


def test_a_reward_that_compares_needs_a_field_to_compare_with() -> None:
    def compares(completion: str, ground_truth: str) -> float:
        return float(completion == ground_truth)

    with raises(RewardError, "no_answer_field", reward="accuracy") as raised:
        built((create_reward("accuracy"), 1.0), has_answer=False)
    assert all(key in str(raised.value) for key in ("dataset.answer_field", "dataset.ground_truth_field"))
    with raises(RewardError, "no_answer_field", reward="compares"):
        built((create_reward(compares), 1.0), has_answer=False)
    built((create_reward("length"), 1.0), has_answer=False)
