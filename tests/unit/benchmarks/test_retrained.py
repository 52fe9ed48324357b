"""The comparison of retrained objectives with live runs."""

from __future__ import annotations

from benchmarks.learning.report import WINDOW
from benchmarks.learning.retrained import Retrained, kendall, page


def test_kendall_counts_swapped_pairs() -> None:
    one = {"a": 1.0, "b": 2.0, "c": 3.0}
    assert kendall(one, one) == 1.0
    assert kendall(one, {name: -value for name, value in one.items()}) == -1.0
    assert kendall(one, {"a": 2.0, "b": 1.0, "c": 3.0}) == 1 / 3


def test_page_reports_the_last_step_up_to_which_the_ranking_holds() -> None:
    live = {name: [[value] * 3 * WINDOW] * 2 for name, value in (("a", 0.1), ("b", 0.2), ("c", 0.3))}
    sizes = [0.5] * 3 * WINDOW
    found = [
        Retrained("a", [0.1] * WINDOW + [0.9] * WINDOW + [0.1] * WINDOW, sizes),
        Retrained("b", [0.2] * 3 * WINDOW, sizes),
        Retrained("c", [0.3] * 3 * WINDOW, sizes),
    ]
    text = page({"date": "today"}, found, live)
    assert f"| {WINDOW} | c > b > a | c > b > a | 1.00 | 1.00 | 50.0% |" in text
    assert f"| {2 * WINDOW} | c > b > a | a > c > b | -0.33 | 1.00 | 50.0% |" in text
    assert text.endswith(f"The ranking of the objectives holds for {WINDOW} steps.\n")
