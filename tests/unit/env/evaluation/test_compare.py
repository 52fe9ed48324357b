"""Paired differences of two evaluations equal values computed by hand."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from tests.support.errors import raises

from gristmill.folders import EVALUATION_FILE, EVALUATION_GROUPS_FILE
from gristmill.internal.saved import SavedGroup
from gristmill_env.errors import EvaluationError
from gristmill_env.evaluation.compare import compare
from gristmill_env.evaluation.plan import Plan

from .made import PLAN, judged, plan, prompt, sample


def evaluation(folder: Path, records: list[SavedGroup], of: Plan = PLAN) -> Path:
    folder.mkdir()
    (folder / EVALUATION_FILE).write_bytes(msgspec.json.encode(of))
    (folder / EVALUATION_GROUPS_FILE).write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return folder


def test_comparison_takes_the_difference_prompt_by_prompt(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", [judged(0, 0, 0), judged(1, 1, 1), judged(2, 0, 1), judged(3, 0, 0)])
    b = evaluation(tmp_path / "b", [judged(3, 1, 0), judged(2, 1, 1), judged(1, 1, 1), judged(0, 0, 0)])
    found = compare(a, b)
    right = {difference.name: difference for difference in found.differences}["right"]
    # Differences 0, 0, 1/2, 1/2: mean 1/4, each 1/4 away from it.
    stderr = math.sqrt(4 / 16 / 3 / 4)
    assert (right.first, right.second, right.estimate.value) == (0.375, 0.625, 0.25)
    assert right.estimate.stderr == pytest.approx(stderr)
    assert right.estimate.low == pytest.approx(0.25 - 1.959964 * stderr)
    assert (right.better, right.worse, right.same) == (2, 0, 2)
    # z = √3; twice the normal tail beyond it.
    assert right.p_value == pytest.approx(0.0832645, abs=1e-6)
    assert [difference.name for difference in found.differences] == ["right", "pass@2", "accuracy", "length", "total"]
    assert found.cautions == []


def test_paired_comparison_detects_a_difference_within_separate_intervals(tmp_path: Path) -> None:
    """Nine prompts, each a little better than before, and very different from one another."""
    before = [prompt(n, [sample(0, length=n / 10)]) for n in range(9)]
    after = [prompt(n, [sample(0, length=n / 10 + 0.04 + 0.01 * (n % 3))]) for n in range(9)]
    one = plan(samples=1)
    found = compare(evaluation(tmp_path / "a", before, one), evaluation(tmp_path / "b", after, one))
    length = {difference.name: difference for difference in found.differences}["length"]
    assert length.estimate.value == pytest.approx(0.05)
    assert length.estimate.stderr == pytest.approx(math.sqrt(6 * 0.01**2 / 8 / 9))
    assert length.estimate.low is not None
    assert length.estimate.low > 0.04


def test_equal_differences_that_rounding_makes_unequal_have_no_p_value(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", [judged(0, 0, 0, 1), judged(1, 0, 1, 1), judged(2, 0, 0, 0)])
    b = evaluation(tmp_path / "b", [judged(0, 0, 1, 1), judged(1, 1, 1, 1), judged(2, 0, 0, 1)])
    right = {difference.name: difference for difference in compare(a, b).differences}["right"]
    assert (right.better, right.p_value) == (3, None)


def test_comparison_of_an_evaluation_with_itself_finds_no_difference(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", [judged(0, 0, 1), judged(1, 1, 1)])
    for difference in compare(a, a).differences:
        assert (difference.estimate.value, difference.estimate.stderr, difference.p_value) == (0, 0, None)
        assert (difference.better, difference.worse, difference.same) == (0, 0, 2)


def test_comparison_uses_shared_values_and_reports_other_differences(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", [judged(0, 1, 1), judged(1, 1, 1), prompt(2, [], reason="too_long")])
    other = plan(samples=1, model="other", dataset="elsewhere")
    b = evaluation(tmp_path / "b", [judged(1, 0), judged(2, 1), prompt(3, [sample(1)])], other)
    found = compare(a, b)
    assert (found.prompts, found.first.prompts, found.second.prompts) == (1, 2, 3)
    assert found.differences[0].estimate.value == -1
    assert found.differences[0].estimate.stderr is None
    assert [caution.partition(" ")[0] for caution in found.cautions] == ["the", "samples"]


def test_comparison_reports_different_prompts_of_the_same_rows(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", [judged(0, 1), judged(1, 1)])
    b = evaluation(tmp_path / "b", [judged(0, 1), prompt(1, [sample(1)], prompt_text="Think! What is 1 + 1?")])
    assert compare(a, b).cautions == ["1 of 2 prompts are not the same, word for word"]


def test_evaluations_of_different_data_are_refused(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", [judged(0, 1)])
    b = evaluation(tmp_path / "b", [prompt(0, [sample(1)], answer="Paris")])
    with raises(EvaluationError, "answers_differ", row=0, first=a, second=b):
        compare(a, b)
    with raises(EvaluationError, "no_common_rows", first=a, second=tmp_path / "c"):
        compare(a, evaluation(tmp_path / "c", [judged(7, 1)]))
    with raises(EvaluationError, "evaluation_missing", path=tmp_path / "gone" / EVALUATION_FILE):
        compare(a, tmp_path / "gone")
