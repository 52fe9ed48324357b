"""The figures of records, by hand; the results file, and the tables for people."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gristmill.folders import EVALUATION_RESULTS_FILE
from gristmill.internal.saved import SavedGroup
from gristmill_env.evaluation.estimators import mean
from gristmill_env.evaluation.report import show
from gristmill_env.evaluation.results import (
    Evaluated,
    metrics,
    row,
    summarise,
    write_results,
)

from .made import PLAN, judged, plan, prompt, sample

RECORDS = [judged(0, 1, 1), judged(1, 1, 0), prompt(2, [sample(0), sample(0)], max_tokens=5)]


def evaluated(folder: Path, records: list[SavedGroup]) -> Evaluated:
    return Evaluated(PLAN, summarise(PLAN, records), folder, started=100.0, ended=107.5, resumed=1)


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.fixture
def sums(tmp_path: Path) -> Evaluated:
    return evaluated(tmp_path, RECORDS)


def test_results_file_has_the_figures_and_what_they_are_of(sums: Evaluated) -> None:
    write_results(sums)
    found = json.loads((sums.folder / EVALUATION_RESULTS_FILE).read_text())
    assert (found["figures"]["pass@1"], found["figures"]["reward/accuracy"]) == (0.5, 0.5)
    assert found["figures"]["pass@1_stderr"] == pytest.approx((0.25 / 3) ** 0.5)
    low, high = found["intervals"]["pass@1"]
    assert 0 <= low < 0.5 < high <= 1
    assert found["rewards"]["accuracy"] == {"min": 0, "max": 1, "scored": 6, "skipped": 0, "errors": 0}
    assert (found["prompts"], found["rows"], found["completions"], found["seconds"]) == (3, 4, 6, 7.5)
    assert found["sampling"] == {
        "samples": 2, "temperature": 1.0, "top_p": 1.0, "max_tokens": 8, "max_tokens_least": 5,
    }  # fmt: skip
    assert (found["task"], found["model"], found["weights"]) == ("sums", "tiny", "1.20")
    assert (found["dataset"], found["decides"], found["digest"]) == (PLAN.dataset, "accuracy", PLAN.digest)
    assert found["versions"] == {"1.20": 6}
    assert {"python", "gristmill-env", "math-verify", "datasets"} <= found["packages"].keys()


def test_metrics_row_for_the_api_has_numbers_words_and_one_level_of_groups(sums: Evaluated) -> None:
    values = row({None: sums})
    assert (values["pass@1"], values["prompts"], values["samples"], values["seconds"]) == (0.5, 3, 2, 7.5)
    assert values["errors"] == {"accuracy": 0, "length": 0}
    for value in values.values():
        for one in value.values() if isinstance(value, dict) else [value]:
            assert isinstance(one, int | float | str)


def test_metrics_row_of_several_evaluations_has_their_names(sums: Evaluated) -> None:
    one = row({None: sums})
    both = row({"sums": sums, "words": sums})
    assert both == {f"{name}/{key}": value for name in ("sums", "words") for key, value in one.items()}


def test_result_tables_show_the_figures(sums: Evaluated) -> None:
    console = Console(width=140, file=StringIO())
    show(console, sums)
    text = written(console)
    for part in (
        "model tiny (weights 1.20)",
        "data set 'sums.jsonl' (split test)",
        "2 samples each, temperature 1, top_p 1",
        "accuracy is 1",
        "pass@2",
        "0.6667",
        "maj@2",
        "max_tokens (5 to 8) 0.0%",
        "7.5 s, 1 prompts resumed",
    ):
        assert part in text


def test_evaluation_without_completions_has_files_and_tables(tmp_path: Path) -> None:
    nothing = evaluated(tmp_path, [prompt(0, [], reason="too_long")])
    write_results(nothing)
    assert json.loads((tmp_path / EVALUATION_RESULTS_FILE).read_text())["figures"] == {}
    console = Console(width=140, file=StringIO())
    show(console, nothing)
    assert "not asked: 1 too_long" in written(console)


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
    assert (found.asked, found.stats.completions, found.skipped) == (4, 8, {})


def test_summary_has_values_per_reward_and_unscored_completions_are_not_zero() -> None:
    failing = "accuracy: ValueError: no"
    records = [
        prompt(0, [sample(1, length=0.2), sample(None, length=0.4)]),  # accuracy skips the second
        prompt(
            1,
            [sample(0, length=0.6), sample(None, length=0.8, error=failing, errors={"accuracy": failing}, total=None)],
        ),
    ]
    found = summarise(plan(), records)
    accuracy, length = found.rewards["accuracy"], found.rewards["length"]
    assert (accuracy.count, accuracy.skipped, accuracy.errors) == (2, 1, 1)
    assert accuracy.mean == 0.5
    assert (accuracy.low, accuracy.high) == (0, 1)
    assert length.mean == pytest.approx(0.5)
    estimate = mean(length.means)
    assert estimate is not None
    assert estimate.stderr == pytest.approx(0.2)  # of 0.3 and 0.7
    assert (length.low, length.high, length.count, length.errors) == (0.2, 0.8, 4, 0)
    assert found.rewards["total"].errors == 1
    assert found.rewards["total"].count == 2


def test_prompts_with_unscored_completions_count_with_the_scored_ones() -> None:
    found = summarise(plan(), [judged(0, 1, None), judged(1, 0, 1), judged(2, None, None)])
    assert (found.passes[1].value, found.passes[1].prompts) == (0.75, 2)
    assert (found.passes[2].value, found.passes[2].prompts) == (1.0, 1)
    assert found.all_right == 0.0
    assert found.asked == 3


def test_summary_majority_needs_answers_and_several_completions() -> None:
    record = prompt(0, [sample(1), sample(0, extracted="7"), sample(0, extracted="7")])
    assert summarise(plan(samples=3), [record]).majority.value == 0.0  # type: ignore[union-attr]
    assert summarise(plan(samples=3, compares=False), [record]).majority is None
    assert summarise(plan(samples=1), [judged(0, 1)]).majority is None


def test_summary_reports_extraction_truncation_and_lengths() -> None:
    samples = [
        sample(1, tokens=2, extracted=None),  # right, so an answer was found in it
        sample(0, tokens=4, extracted=None),
        sample(0, tokens=6, extracted="7", finish_reason="length"),
        sample(0, tokens=8, extracted="7"),
    ]
    found = summarise(plan(samples=4), [prompt(0, samples)])
    assert (found.unextracted, found.truncated) == (0.25, 0.25)
    assert (found.lengths[0.0], found.lengths[0.5], found.lengths[1.0], found.length_mean) == (2, 5, 8, 5)
    assert summarise(plan(samples=4, compares=False), [prompt(0, samples)]).unextracted is None


def test_skipped_prompts_are_counted_and_excluded_from_all_figures() -> None:
    records = [judged(0, 1, 1), prompt(1, [], reason="too_long"), prompt(2, [], reason="too_long")]
    found = summarise(plan(), records)
    assert (found.asked, found.skipped, found.passes[1].value) == (1, {"too_long": 2}, 1.0)


def test_summary_reports_weights_that_changed_during_the_evaluation() -> None:
    records = [judged(0, 1, 1), prompt(1, [sample(1, versions=["1.20", "1.21"]), sample(1, versions=["1.21"])])]
    assert summarise(plan(), records).versions == {"1.20": 2, "1.20+1.21": 1, "1.21": 1}


@pytest.mark.parametrize("records", [[], [prompt(0, [], reason="bad_row")]])
def test_summary_without_completions_has_no_values_instead_of_zeros(records: list[SavedGroup]) -> None:
    found = summarise(plan(), records)
    assert (found.passes, found.mean, found.truncated, found.all_wrong, found.max_tokens) == (
        {},
        None,
        None,
        None,
        None,
    )
    assert metrics(plan(), found) == {}
