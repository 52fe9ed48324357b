"""Metrics as charts: any metric of a run, the ways to draw curves, and runs on one axis, in a real Chromium."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.browser.conftest import Demo
from tests.support.chromium import settled

_PLOT = "document.querySelector('.panel .plot').chart"


def opened(page: Any, demo: Demo, path: str) -> None:
    page.goto(demo.url + path)
    settled(page)


def axis(page: Any) -> Any:
    """Returns the values of the x axis of the first chart."""
    return page.evaluate(f"() => {_PLOT}.plot.data[0]")


def test_metric_of_the_list_gets_a_chart_and_the_address_keeps_it(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart/metrics")
    assert page.locator(".panel").count() == 0
    page.locator("#find").fill("CHECKPOINT")
    assert [name.strip() for name in page.locator(".names li:visible").all_inner_texts()] == ["seconds.checkpoint"]
    page.locator(".names input:visible").check()
    page.wait_for_selector(".panel canvas")
    page.locator("#find").fill("no such metric")
    assert page.locator(".names li:visible").all_inner_texts() == ["No metric has this in its name."]
    page.locator("#find").fill("ratio.p")
    page.locator(".names label:has-text('ratio.p01') input").check()
    page.wait_for_function("() => document.querySelectorAll('.panel canvas').length === 2")
    assert page.url.endswith("/metrics?m=seconds.checkpoint&m=ratio.p01")
    page.reload()
    settled(page)
    assert page.locator(".panel .name").all_inner_texts() == ["seconds.checkpoint", "ratio.p01"]
    page.locator(".names input:checked").first.uncheck()
    page.wait_for_function("() => document.querySelectorAll('.panel canvas').length === 1")
    assert page.url.endswith("/metrics?m=ratio.p01")


@pytest.mark.long
def test_chosen_metric_grows_while_the_run_trains(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/training/metrics?m=grad_norm&x=tokens")
    assert axis(page)[-1] == 24 * 2200
    demo.clock.now += 20  # 10 steps
    page.wait_for_function(f"(tokens) => {_PLOT}.data.x.at(-1) === tokens", arg=34 * 2200)
    assert len(page.evaluate(f"() => {_PLOT}.data.lines[0].values")) == 34


def test_metric_with_a_hostile_name_stays_text(page: Any, demo: Demo) -> None:
    name = "<img src=x onerror=window.__owned=1>,\u202e"

    def fulfill(route: Any) -> None:
        answer = route.fetch()
        found = answer.json()
        route.fulfill(response=answer, json={**found, "names": [name], "series": {name: {"mean": [1.0] * 60}}})

    page.route(re.compile(r"/series\?"), fulfill)
    opened(page, demo, "/view/quickstart/metrics")
    page.locator(".names input").check()
    page.wait_for_selector(".panel canvas")
    assert page.locator(".panel .name").inner_text() == "<img src=x onerror=window.__owned=1>,[U+202E]"
    assert page.evaluate("() => window.__owned") is None
    assert page.locator("main img").count() == 0


@pytest.mark.long
def test_x_axis_of_all_curves_is_steps_tokens_or_time(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart")
    assert axis(page)[-1] == 60
    page.locator("select[name=x]").select_option("tokens")
    assert axis(page)[-1] == 60 * 2200
    assert page.evaluate(f"() => {_PLOT}.data.marks.at(-1).x") == 60 * 2200, "evaluations move with their steps"
    page.locator("select[name=x]").select_option("time")
    spent = page.evaluate(
        "() => document.querySelectorAll('.panel.wide .plot')[1].chart.data.lines.map((l) => l.values)"
    )
    assert abs(axis(page)[-1] - sum(map(sum, spent))) < 0.01
    assert page.url.endswith("?x=time")
    page.locator(".panel .u-over").first.click(position={"x": 400, "y": 60})
    page.wait_for_url(re.compile(r"/view/quickstart/step/\d+$"))


@pytest.mark.long
def test_smoothed_curve_keeps_its_values_behind_it(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart/metrics?m=grad_norm")
    values = page.evaluate(f"() => {_PLOT}.data.lines[0].values")
    page.locator("select[name=smooth]").select_option("0.9")
    smooth, raw = page.evaluate(f"() => [{_PLOT}.data.lines[0].values, {_PLOT}.data.lines[0].raw]")
    assert raw == values
    total = sum(0.9**at for at in range(60))
    mean = sum(value * 0.9 ** (59 - at) for at, value in enumerate(values)) / total
    assert abs(smooth[-1] - mean) < 1e-9
    assert page.evaluate(f"() => {_PLOT}.plot.series.length") == 3
    page.reload()
    settled(page)
    assert page.evaluate(f"() => {_PLOT}.data.lines[0].values") == smooth, "the address keeps the smoothing"


@pytest.mark.long
def test_logarithmic_axis_leaves_out_zero(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/quickstart/metrics?m=seconds.checkpoint")
    page.locator("input[name=log]").check()
    values = page.evaluate(f"() => {_PLOT}.data.lines[0].values")
    assert values[:4] == [None] * 4
    assert values[4] > 0
    assert page.evaluate(f"() => {_PLOT}.plot.scales.y.distr") == 3


# --- Compare ----------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_runs_that_differ_in_their_seeds_become_one_line_with_a_spread(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/compare?runs=quickstart,quickstart-lr3,quickstart-seed2")
    lines = f"() => {_PLOT}.data.lines.map(({{label, values, low, high}}) => ({{label, values, low, high}}))"
    single = {line["label"]: line["values"] for line in page.evaluate(lines)}
    assert [*single] == ["quickstart", "quickstart-lr3", "quickstart-seed2"]
    page.locator("select[name=by]").select_option("seeds")
    both, other = page.evaluate(lines)
    assert (both["label"], other["label"]) == ("2 × quickstart", "quickstart-lr3")
    assert other["values"] == single["quickstart-lr3"]
    first, second = (single[name][9] for name in ("quickstart", "quickstart-seed2"))
    side = abs(first - second) / 2**0.5  # the sample standard deviation of two values
    assert first != second
    assert [both[name][9] for name in ("low", "values", "high")] == pytest.approx(
        [(first + second) / 2 - side, (first + second) / 2, (first + second) / 2 + side]
    )
    assert both["values"][45:] == single["quickstart"][45:], "the other seed ends at step 45"
    rows = page.locator(".run-facts table:first-of-type tbody tr")
    assert rows.locator("a").all_inner_texts() == ["quickstart", "quickstart-seed2", "quickstart-lr3"]
    assert rows.locator(".line-1").count() == 2, "runs of one line have its colour"
    page.reload()
    settled(page)
    assert len(page.evaluate(lines)) == 2, "the address keeps the choice"


@pytest.mark.long
def test_runs_are_compared_by_tokens_on_the_lines_between_their_points(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/compare?runs=quickstart,long&x=tokens")
    first, second = page.evaluate(f"() => {_PLOT}.data.lines.map(({{values}}) => values)")
    x = axis(page)
    assert x[-1] == 10_000 * 2200
    assert len(x) <= 1000
    assert [at for at, value in enumerate(first) if value is not None][-1] < 100, "the short run ends"
    assert sum(value is not None for value in second) > 400


def test_seeds_are_not_offered_without_two_runs_of_equal_settings(page: Any, demo: Demo) -> None:
    opened(page, demo, "/view/compare?runs=quickstart,quickstart-lr3")
    assert page.locator("select[name=by]").count() == 0
