"""The capacity table of docs/operations.md, compared with the measured results from which it is computed."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "api.json").read_text())
PAGE = (ROOT / "docs" / "operations.md").read_text().partition("## Capacity")[2].partition("\n## ")[0]
ROW = re.compile(
    r"^\| (?P<sequences>\d+) × (?P<tokens>[\d,]+) \| (?P<speed>[\d,]+) \| (?P<rate>[\d.]+) \| (?P<kilobytes>\d+) "
    r"\| (?P<hour>\d+) \| (?P<gpus>[\d,]+) \|$",
    re.MULTILINE,
)
ROWS = [{name: float(text.replace(",", "")) for name, text in row.groupdict().items()} for row in ROW.finditer(PAGE)]
ROUNDED = 0.04
"""The table has two digits of most figures."""


def shape(row: dict[str, float]) -> str:
    return f"{row['sequences']:.0f} x {row['tokens']:.0f}"


def test_table_has_each_measured_shape() -> None:
    assert {shape(row) for row in ROWS} == set(RESULTS["speed"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{shape(row)} at {row['speed']:.0f}")
def test_row_follows_from_the_measured_results(row: dict[str, float]) -> None:
    size = RESULTS["sizes"][shape(row)]["binary"]
    measured = statistics.median(RESULTS["speed"][shape(row)]["native"]["submits"])
    rate = row["speed"] / (row["sequences"] * row["tokens"] * 3 / 4)  # A quarter of the tokens is the prompt.
    assert row["rate"] == pytest.approx(rate, rel=ROUNDED)
    assert row["kilobytes"] == pytest.approx(rate * size / 1e3, rel=ROUNDED)
    assert row["hour"] == pytest.approx(rate * size * 3600 / 1e6, rel=ROUNDED)
    assert row["gpus"] == pytest.approx(measured / rate, rel=ROUNDED)


def test_bytes_of_a_token_follow_from_the_measured_results() -> None:
    found = re.search(r"takes ([\d.]+) bytes.*?Redis needs\s+([\d.]+) times that, so ([\d.]+) bytes", PAGE, re.DOTALL)
    assert found is not None
    wire, factor, stored = map(float, found.groups())
    for row in ROWS:
        size = RESULTS["sizes"][shape(row)]["binary"]
        assert wire == pytest.approx(size / (row["sequences"] * row["tokens"]), rel=ROUNDED)
    for case in RESULTS["stored"]:
        assert factor == pytest.approx(case["redis_bytes"] / case["payload_bytes"], rel=ROUNDED)
    assert stored == pytest.approx(wire * factor, rel=ROUNDED)
