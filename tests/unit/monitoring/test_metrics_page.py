"""docs/metrics.md has every metric of a step and every metric for Prometheus, and no other."""

from __future__ import annotations

import re

import msgspec
from tests.support.exported_metrics import ROOT, alerts, exported

from gristmill.internal.metrics import FIELDS, StepMetrics
from gristmill_view import report

PAGE = (ROOT / "docs" / "metrics.md").read_text()
NAMES = [field.name for field in msgspec.structs.fields(StepMetrics)]


def first_cells() -> list[str]:
    """Returns the first cell of each row of the page's tables."""
    return [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]


def test_page_has_a_row_for_every_metric_of_a_step() -> None:
    named = set(re.findall(r"`(\w+)`", " ".join(first_cells())))
    assert {*NAMES} - named == set()


def test_page_names_the_metrics_of_prometheus_that_exist_and_no_other() -> None:
    named = set(re.findall(r"`(gristmill_(?:api|env|trainer)_\w+)(?:\{[^`]*\})?`", PAGE))
    assert named == exported()


def test_table_has_every_field_of_a_step_once() -> None:
    assert sorted(row.field for row in FIELDS) == sorted(NAMES)
    assert len({row.exported for row in FIELDS}) == len(FIELDS)


def test_row_of_a_field_names_its_metric_in_prometheus() -> None:
    for row in FIELDS:
        assert len(re.findall(rf"^\| `{row.field}` \| `{row.exported}(?:\{{\w+\}})?` \|", PAGE, re.MULTILINE)) == 1


def test_page_and_report_draw_metrics_that_exist() -> None:
    page = (ROOT / "view" / "src" / "gristmill_view" / "static" / "overview.js").read_text()
    drawn = re.findall(r'\["([a-z_]+)(?:\.\w+)?", "', page.partition("const LOOK")[0])
    drawn += [name.partition(".")[0] for _, names in report.PANELS for name in names]
    assert len(drawn) > 20
    assert {*drawn} - {*NAMES} == set()


def test_page_names_every_alert() -> None:
    named = set(re.findall(r"\*\*(\w+)\*\*", PAGE))
    assert {rule["alert"] for rule in alerts()} - named == set()
