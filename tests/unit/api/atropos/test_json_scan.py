"""The scan of a matrix's bytes agrees with reading it as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_api.atropos.fast_parse import Matrix, scan

BLANK = st.text(" \t\r\n", max_size=3)
INT = st.integers(-(10**20), 10**20).map(str)
FLOAT = st.floats(allow_nan=False, allow_infinity=False).map(repr)
NUMBER = st.one_of(INT, FLOAT, st.sampled_from(["1E5", "1.5E-7", "1.5e+7", "-0", "-0.0", "0e0", "1.0e-999"]))


def spaced(parts: list[str], blanks: list[str]) -> str:
    inner = ",".join(blank + part + blank for part, blank in zip(parts, blanks, strict=True))
    return f"{blanks[0] if blanks else ' '}[{inner}]"


@st.composite
def matrices(draw: st.DrawFn, number: st.SearchStrategy[str]) -> str:
    rows = draw(st.lists(st.lists(number, max_size=5), max_size=5))
    texts = [spaced(row, [draw(BLANK) for _ in row]) for row in rows]
    return spaced(texts, [draw(BLANK) for _ in texts]) + draw(BLANK)


def as_json(text: str) -> Matrix:
    """The expected result of scan."""
    written: list[list[str]] = json.loads(text, parse_int="i{}".format, parse_float="f{}".format)
    numbers = [number for row in written for number in row]
    return Matrix(
        rows=[len(row) for row in written],
        whole=all(number.startswith("i") for number in numbers),
        pointed=all("." in number and not _may_overflow(number) for number in numbers),
    )


def _may_overflow(number: str) -> bool:
    exponent = number.lower().partition("e")[2]
    return bool(exponent) and not exponent.startswith("-")


@pytest.mark.slow
@given(matrices(NUMBER))
def test_scan_reads_the_shape_of_any_matrix(text: str) -> None:
    assert scan(text.encode()) == as_json(text)


@pytest.mark.slow
@given(matrices(INT))
def test_scan_recognizes_matrices_of_ints(text: str) -> None:
    found = scan(text.encode())
    assert found is not None
    assert found.whole


@pytest.mark.slow
@given(matrices(FLOAT))
def test_scan_calls_a_matrix_pointed_only_if_all_numbers_are_finite_floats(text: str) -> None:
    found = scan(text.encode())
    assert found is not None
    if found.pointed:
        assert all(isinstance(number, float) and math.isfinite(number) for row in json.loads(text) for number in row)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(0, 9) | st.text("[]e.,1 ", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("[1,", max_size=2), inner, max_size=2),
    max_leaves=8,
)


@pytest.mark.slow
@given(JSON)
def test_scan_of_any_json_is_a_matrix_or_none(value: Any) -> None:
    is_matrix = isinstance(value, list) and all(
        isinstance(row, list) and all(isinstance(n, int | float) and not isinstance(n, bool) for n in row)
        for row in value
    )
    found = scan(json.dumps(value).encode())
    assert (found is not None) == is_matrix
    if found is not None:
        assert found.rows == [len(row) for row in value]


@pytest.mark.parametrize("blanks", [1, 63, 64, 65, 200])
def test_scan_reads_a_row_of_blanks_as_empty(blanks: int) -> None:
    found = scan(b"[[" + b" " * blanks + b"], [" + b" " * blanks + b"1]]")
    assert found is not None
    assert found.rows == [0, 1]
