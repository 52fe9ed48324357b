"""The order of several sources: their counts match their weights at every moment, whatever was asked before."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.errors import raises

from gristmill_env.data.schedule import MOST_NUMBERS, Schedule
from gristmill_env.errors import DatasetError

pytestmark = pytest.mark.slow

WEIGHTS = st.lists(
    st.integers(1, 30).map(float) | st.integers(1, 99).map(lambda percent: percent / 100), min_size=1, max_size=6
).map(lambda found: {f"source-{number}": weight for number, weight in enumerate(found)})


@given(WEIGHTS, st.integers(1, 300))
def test_counts_of_sources_differ_from_their_weights_by_less_than_one(weights: dict[str, float], numbers: int) -> None:
    schedule, counts = Schedule(weights), dict.fromkeys(weights, 0)
    parts = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    total = sum(parts.values())
    for number in range(numbers):
        name, row = schedule.at(number)
        assert row == counts[name], "each source counts its own rows"
        counts[name] += 1
        assert all(abs(counts[name] - (number + 1) * part / total) < 1 for name, part in parts.items())


@given(WEIGHTS, st.permutations(range(60)))
def test_order_depends_on_the_numbers_alone(weights: dict[str, float], asked: list[int]) -> None:
    schedule = Schedule(weights)
    found = {number: schedule.at(number) for number in asked}
    again = Schedule(dict(reversed(weights.items())))
    assert found == {number: again.at(number) for number in range(60)}, "nor on the order of the sources"


@given(WEIGHTS, st.integers(0, 500))
def test_number_of_a_row_is_the_number_that_plays_it(weights: dict[str, float], number: int) -> None:
    schedule = Schedule(weights)
    assert schedule.number(*schedule.at(number)) == number


def test_rows_of_later_periods_continue() -> None:
    schedule = Schedule({"a": 1, "b": 2})
    rows = [row for name, row in map(schedule.at, range(3_000_000, 3_000_030)) if name == "b"]
    assert rows == list(range(2_000_000, 2_000_020))


@pytest.mark.parametrize("weights", [{"a": 0.123456789, "b": 1.0}, {"a": 1e6, "b": 1.0}])
def test_weights_that_hardly_repeat_are_refused(weights: dict[str, float]) -> None:
    with raises(DatasetError, "weights_too_fine") as raised:
        Schedule(weights)
    assert raised.value.values["period"] > MOST_NUMBERS
