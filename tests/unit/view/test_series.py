"""The metrics of a run, decimated to the points of a chart."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.view.recorded import rows

from gristmill_view.series import series


def test_series_keeps_minimum_and_maximum_of_each_bucket() -> None:
    found = series(rows(), ["reward_mean", "reward_parts.*", "unknown"], points=2)
    assert found["step"] == [4, 8]
    assert found["series"]["reward_mean"]["min"] == [0.225, 0.2953]
    assert found["series"]["reward_mean"]["max"] == [0.4031, 0.5203]
    assert found["series"]["reward_mean"]["mean"] == pytest.approx([0.338275, 0.41955])
    assert [*found["series"]] == ["reward_mean", "reward_parts.format", "reward_parts.accuracy"]
    assert found["phases"]["wait"] == [0.5, 0.5]


def test_series_with_few_rows_has_one_bucket_per_row_and_null_for_missing_values() -> None:
    table: list[dict[str, Any]] = [{"step": 1, "loss": 1.0}, {"step": 2}, {"step": 3, "loss": "nan"}]
    found = series(table, ["loss"], points=600)
    assert (found["step"], found["series"]) == ([1, 2, 3], {"loss": {"mean": [1.0, None, None]}})
    assert (found["phases"], found["names"]) == ({}, ["loss"])
    assert found["sums"] == {"tokens": [0.0] * 3, "seconds": [0.0] * 3}
    nothing: dict[str, list[float]] = {"tokens": [], "seconds": []}
    assert series([], ["loss"], 600) == {"step": [], "sums": nothing, "series": {}, "phases": {}, "names": []}


def test_series_sums_tokens_and_seconds_up_to_the_end_of_each_bucket() -> None:
    found = series(rows(), [], points=2)
    assert found["sums"]["tokens"] == [4 * 2200, 8 * 2200]
    assert found["sums"]["seconds"] == pytest.approx([4.4, 8.8])


def test_series_finds_metrics_that_few_rows_of_a_long_run_have() -> None:
    many = [{"step": step, "tokens": 1.0, "seconds": {"train": 1.0}} for step in range(1, 2001)]
    for step in range(11, 2001, 100):
        many[step] = {**many[step], "seconds": {"train": 1.0, "checkpoint": 5.0}}
    many[777] = {**many[777], "rejected": {"stale": 3.0}}
    found = series(many, ["rejected.*"], points=10)
    assert {"seconds.checkpoint", "rejected.stale"} <= set(found["names"])
    assert list(found["series"]) == ["rejected.stale"]
    assert found["sums"]["seconds"][-1] == 2000 + 20 * 5.0


def test_series_names_every_metric_and_bounds_the_metrics_of_an_answer() -> None:
    parts = {f"part {number}": 0.5 for number in range(3000)}
    found = series(rows(reward_parts=parts), ["loss", "reward_parts.*"], points=10)
    assert len(found["series"]) == 200
    assert len(found["names"]) == 2000
    assert found["names"][:3] == ["reward_mean", "reward_parts.part 0", "reward_parts.part 1"]
