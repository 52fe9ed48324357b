"""From records to summary values, by hand."""

from __future__ import annotations

import math

import pytest

from gristmill_env.evaluation.results import metrics, summarise
from gristmill_env.evaluation.samples import PromptRecord

from .made import judged, plan, prompt, sample


def test_pass_mean_and_groups() -> None:
    records = [judged(0, 1, 1), judged(1, 1, 0), judged(2, 0, 0), judged(3, 0, 0)]
    found = summarise(plan(), records)
    assert list(found.passes) == [1, 2]
    assert found.passes[1].value == 3 / 8
    assert found.passes[2].value == 0.5
    assert found.mean == found.passes[1]
    # Per-prompt means 1, 1/2, 0, 0.
    assert found.passes[1].stderr == pytest.approx(math.sqrt((25 + 1 + 9 + 9) / 64 / 3 / 4))
    assert (found.all_right, found.all_wrong) == (0.25, 0.5)
    assert (found.asked, found.completions, found.skipped) == (4, 8, {})


def test_summary_has_values_per_reward_and_unscored_completions_are_not_zero() -> None:
    failing = "accuracy: ValueError: no"
    records = [
        prompt(0, [sample(1, length=0.2), sample(None, length=0.4)]),  # accuracy skips the second
        prompt(
            1,
            [sample(0, length=0.6), sample(None, length=0.8, error=failing, failed={"accuracy": failing}, total=None)],
        ),
    ]
    found = summarise(plan(), records)
    accuracy, length = found.rewards["accuracy"], found.rewards["length"]
    assert (accuracy.scored, accuracy.skipped, accuracy.errors) == (2, 1, 1)
    assert accuracy.mean is not None
    assert accuracy.mean.value == 0.5
    assert (accuracy.low, accuracy.high) == (0, 1)
    assert length.mean is not None
    assert length.mean.value == pytest.approx(0.5)
    assert length.mean.stderr == pytest.approx(0.2)  # of 0.3 and 0.7
    assert (length.low, length.high, length.scored, length.errors) == (0.2, 0.8, 4, 0)
    assert found.total.errors == 1
    assert found.total.scored == 2


def test_prompts_with_fewer_judged_completions_count_as_far_as_they_go() -> None:
    found = summarise(plan(), [judged(0, 1, None), judged(1, 0, 1), judged(2, None, None)])
    assert (found.passes[1].value, found.passes[1].prompts) == (0.75, 2)
    assert (found.passes[2].value, found.passes[2].prompts) == (1.0, 1)
    assert found.all_right == 0.0
    assert found.asked == 3


def test_summary_majority_needs_answers_and_several_completions() -> None:
    record = prompt(0, [sample(1), sample(0, answer="7"), sample(0, answer="7")])
    assert summarise(plan(samples=3), [record]).majority.value == 0.0  # type: ignore[union-attr]
    assert summarise(plan(samples=3, compares=False), [record]).majority is None
    assert summarise(plan(samples=1), [judged(0, 1)]).majority is None


def test_extraction_truncation_and_lengths() -> None:
    samples = [
        sample(1, tokens=2, answer=None),  # right, so an answer was found in it
        sample(0, tokens=4, answer=None),
        sample(0, tokens=6, answer="7", finish_reason="length"),
        sample(0, tokens=8, answer="7"),
    ]
    found = summarise(plan(samples=4), [prompt(0, samples)])
    assert (found.unextracted, found.truncated) == (0.25, 0.25)
    assert (found.lengths[0.0], found.lengths[0.5], found.lengths[1.0], found.length_mean) == (2, 5, 8, 5)
    assert summarise(plan(samples=4, compares=False), [prompt(0, samples)]).unextracted is None


def test_prompts_that_were_not_asked_are_counted_and_in_no_figure() -> None:
    records = [judged(0, 1, 1), prompt(1, [], skipped="too_long"), prompt(2, [], skipped="too_long")]
    found = summarise(plan(), records)
    assert (found.asked, found.skipped, found.passes[1].value) == (1, {"too_long": 2}, 1.0)


def test_summary_reports_weights_that_changed_during_the_evaluation() -> None:
    records = [judged(0, 1, 1), prompt(1, [sample(1, versions=["1.20", "1.21"]), sample(1, versions=["1.21"])])]
    assert summarise(plan(), records).versions == {"1.20": 2, "1.20+1.21": 1, "1.21": 1}


@pytest.mark.parametrize("records", [[], [prompt(0, [], skipped="bad_row")]])
def test_nothing_answered_is_nothing_and_not_zero(records: list[PromptRecord]) -> None:
    found = summarise(plan(), records)
    assert (found.passes, found.mean, found.truncated, found.all_wrong, found.max_tokens) == (
        {},
        None,
        None,
        None,
        None,
    )
    assert metrics(found, 2) == {}
