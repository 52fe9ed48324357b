"""docs/metrics.md has every metric of a step and every metric for Prometheus, and no other."""

from __future__ import annotations

import re

import msgspec
from tests.support.exported_metrics import ROOT, alerts, exported

from gristmill.metrics import StepMetrics
from gristmill_trainer.prometheus import EXPORTED

PAGE = (ROOT / "docs" / "metrics.md").read_text()
FIELDS = {field.name for field in msgspec.structs.fields(StepMetrics)}


def first_cells() -> list[str]:
    """Returns the first cell of each row of the page's tables."""
    return [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]


def test_page_has_a_row_for_every_metric_of_a_step() -> None:
    named = set(re.findall(r"`(\w+)`", " ".join(first_cells())))
    assert FIELDS - named == set()


def test_page_names_the_metrics_of_prometheus_that_exist_and_no_other() -> None:
    named = set(re.findall(r"`(gristmill_(?:api|env|trainer)_\w+)(?:\{[^`]*\})?`", PAGE))
    assert named == exported()


def test_every_field_of_a_step_is_exported_once() -> None:
    assert [row.field for row in EXPORTED if row.field not in FIELDS] == []
    assert len({row.field for row in EXPORTED}) == len(EXPORTED) == len(FIELDS)
    assert len({row.name for row in EXPORTED}) == len(EXPORTED)


def test_row_of_a_field_names_its_metric_in_prometheus() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for row in EXPORTED:
        name = f"gristmill_trainer_{row.name}" + ("_total" if row.kind == "counter" else "")
        (found,) = [line for line in rows if f"`{row.field}`" in line.split("|")[1]]
        assert re.search(rf"`{name}(?:\{{\w+\}})?`", found), row.field


def test_page_names_every_alert() -> None:
    named = set(re.findall(r"\*\*(\w+)\*\*", PAGE))
    assert {rule["alert"] for rule in alerts()} - named == set()
