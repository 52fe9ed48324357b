"""The metrics between two log entries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rollouts import scored_group

from gristmill_env.errors import DropReason
from gristmill_env.progress import Tally
from gristmill_env.rewards import Failure, Score, correctness_reward, create_reward
from gristmill_env.rollouts.groups import RolloutGroup
from gristmill_env.tracking import Window

pytestmark = pytest.mark.slow

BY_ACCURACY = correctness_reward([create_reward("accuracy")])


def judge(completion: str, ground_truth: str) -> float:
    return 1.0


def prompt(
    totals: Sequence[float | None],
    parts: Mapping[str, Sequence[float | None]],
    lengths: Sequence[int] | None = None,
    reasons: Sequence[str] | None = None,
    seconds: float = 1.0,
    source: str | None = None,
) -> RolloutGroup:
    scores = [Score(total, {name: values[n] for name, values in parts.items()}) for n, total in enumerate(totals)]
    return scored_group(scores, lengths, reasons, seconds, source=source)


def test_window_metrics_of_two_prompts_match_hand_computed_values() -> None:
    window, tally = Window({None: BY_ACCURACY}), Tally()
    window.add(prompt([1.5, 0.0], {"accuracy": [1.0, 0.0], "format": [0.5, None]}, [10, 20], ["stop", "length"], 2.0))
    window.add(prompt([0.5, None], {"accuracy": [0.0, None], "format": [0.5, None]}, [30, 40], seconds=4.0))
    for reason in (None, DropReason.SAME_SCORES, DropReason.TOO_LONG):
        tally.add(reason)
    assert window.take(tally) == pytest.approx(
        {
            "train/rewards_mean": 2 / 3,
            "train/rewards_std": math.sqrt((1.5**2 + 0.5**2) / 3 - 4 / 9),
            "train/rewards_max": 1.5,
            "train/rewards_min": 0.0,
            "train/percent_correct": 1 / 3,
            "train/completion_lengths": 25,
            "train/completion_lengths_std": math.sqrt(125),
            "train/completion_lengths_max": 40,
            "train/completion_lengths_min": 10,
            "train/completion_lengths_p95": 38.5,
            "train/truncation_rate": 0.25,
            "train_perf/task_duration_mean": 3.0,
            "train_perf/task_duration_std": 1.0,
            "train_perf/task_duration_max": 4.0,
            "train_perf/task_duration_min": 2.0,
            "reward/accuracy/mean_raw": 1 / 3,
            "reward/accuracy/min": 0.0,
            "reward/accuracy/max": 1.0,
            "reward/accuracy/skipped": 0.25,
            "reward/accuracy/errors": 0.0,
            "reward/format/mean_raw": 0.5,
            "reward/format/min": 0.5,
            "reward/format/max": 0.5,
            "reward/format/skipped": 0.5,
            "reward/format/errors": 0.0,
            "train/items_sent_to_api": 1,
            "train/items_rejected": 2,
            "groups/submitted": 1,
            "groups/dropped_same_scores": 1,
            "groups/dropped_too_long": 1,
        }
    )


def test_window_restarts_but_group_counts_continue() -> None:
    window, tally = Window({None: BY_ACCURACY}), Tally()
    for reward in (1.0, 0.0):
        window.add(prompt([reward], {"length": [reward]}))
        tally.add(None)
        values = window.take(tally)
        assert values["train/rewards_mean"] == values["reward/length/mean_raw"] == reward
        assert values["train/items_sent_to_api"] == 1
    assert values["groups/submitted"] == 2
    assert window.take(None) == {}


def test_window_omits_unknown_values() -> None:
    window = Window({None: BY_ACCURACY})
    window.add(prompt([None, None], {"accuracy": [None, None]}))
    values = window.take(None)
    assert values["reward/accuracy/skipped"] == 1.0
    assert not [name for name in values if name.startswith("train/rewards") or "correct" in name or "mean_raw" in name]


def test_window_counts_a_failure_as_an_error_and_not_as_a_skip() -> None:
    window = Window({None: BY_ACCURACY})
    said = Score(1.0, {"judge": 1.0, "length": 1.0})
    silent = Score(1.0, {"judge": None, "length": 1.0})
    failed = Score(1.0, {"judge": None, "length": 1.0}, failed={"judge": Failure("judge", "boom", "reward_raised")})
    window.add(scored_group([said, silent, failed, failed]))
    values = window.take(None)
    assert (values["reward/judge/skipped"], values["reward/judge/errors"]) == (0.25, 0.5)
    assert (values["reward/length/skipped"], values["reward/length/errors"]) == (0.0, 0.0)
    assert values["reward/judge/mean_raw"] == 1.0


@pytest.mark.parametrize(
    ("rewards", "parts", "right"),
    [
        (["accuracy"], {"accuracy": [1.0, 0.0]}, 0.5),
        (["accuracy"], {"accuracy": [None, 1 - 1e-12]}, 1.0),
        ([{"type": "mcq", "name": "choice"}], {"choice": [1.0, 1.0]}, 1.0),
        (["accuracy", "mcq"], {"accuracy": [0.0, 0.0], "mcq": [1.0, 1.0]}, 0.0),
        (["r1"], {"r1": [0.5, 1.5], "r1/accuracy": [0.0, 1.0], "r1/format": [1.0, 1.0]}, 0.5),
        (["length", judge], {"length": [1.0, 1.0], "judge": [1.0, 0.5]}, 0.5),
        (["length"], {"length": [1.0, 1.0]}, None),
    ],
)
def test_window_uses_the_correctness_reward(
    rewards: list[Any], parts: dict[str, list[float | None]], right: float | None
) -> None:
    window = Window({None: correctness_reward([create_reward(one) for one in rewards])})
    window.add(prompt([1.0, 1.0], parts))
    assert window.take(None).get("train/percent_correct") == right


_TOTALS = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=4), min_size=1, max_size=6)


@given(groups=_TOTALS)
def test_window_means_are_over_completions_and_not_groups(groups: list[list[float]]) -> None:
    window, flat = Window({None: BY_ACCURACY}), [total for group in groups for total in group]
    for group in groups:
        window.add(prompt(group, {"length": group}))
    values = window.take(None)
    assert values["train/rewards_mean"] == pytest.approx(math.fsum(flat) / len(flat), abs=1e-9)
    assert (values["train/rewards_min"], values["train/rewards_max"]) == (min(flat), max(flat))
    assert values["reward/length/mean_raw"] == values["train/rewards_mean"]


def test_each_source_is_judged_by_its_own_reward() -> None:
    by_words = correctness_reward([create_reward("exact_match")])
    window, tally = Window({"sums": BY_ACCURACY, "words": by_words}), Tally()
    window.add(prompt([1.0, 0.0], {"accuracy": [1.0, 0.0]}, source="sums"))
    window.add(prompt([0.0, 1.0], {"accuracy": [1.0, 1.0], "exact_match": [0.0, 0.0]}, source="words"))
    tally.add(None, source="sums")
    tally.add(DropReason.TOO_LONG, source="words")
    found = window.take(tally)
    assert found["train/percent_correct"] == 0.25
    assert {name: value for name, value in found.items() if name.startswith("source/")} == {
        "source/sums/rewards_mean": 0.5, "source/sums/submitted": 1, "source/sums/dropped": 0,
        "source/words/rewards_mean": 0.5, "source/words/submitted": 0, "source/words/dropped": 1,
    }  # fmt: skip
    assert "source/sums/rewards_mean" not in window.take(tally)
