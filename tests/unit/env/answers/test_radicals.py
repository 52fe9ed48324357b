"""Products of roots and π, compared exactly."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_env.answers.comparison import compare, read_answer
from gristmill_env.answers.numbers import Radical, read_radical


@pytest.mark.parametrize(
    ("latex", "sign", "square", "pi"),
    [
        (r"3\sqrt{2}", 1, "18", 0),
        (r"-\sqrt{2} \cdot 3", -1, "18", 0),
        (r"\frac{3}{\sqrt{2}}", 1, "9/2", 0),
        (r"\frac{2\pi\sqrt{3}}{5}", 1, "12/25", 1),
        (r"\frac{1}{\pi}", 1, "1", -1),
        (r"3 \times \frac{1}{2}", 1, "9/4", 0),
        (r"\frac{\frac{1}{2}}{3}", 1, "1/36", 0),
        (r"0\pi", 0, "0", 0),
        ("8*9", 1, "5184", 0),
    ],
)
def test_product_with_radicals_is_read(latex: str, sign: int, square: str, pi: int) -> None:
    assert read_radical(latex) == Radical(sign, Fraction(square), pi)


@pytest.mark.parametrize(
    "latex",
    ["", "-", "--2", r"3\frac{1}{2}", r"\frac{1}{2}\frac{1}{2}", r"\sqrt{2}3", "2 3", r"\sqrt{2}^2", "2^3", "3!",
     r"\pi^2", r"\pi r", r"\pi_1", r"\pit", "2.5", r"2.5\pi", r"\sqrt{-2}", r"\sqrt{x}", r"\sqrt[3]{2}",
     r"\frac{1}{0}", r"\frac{1}{2", r"\frac{1}2", r"\frac{1}{2}}", r"2\cdot", r"\cdot 2", r"2\cdot\cdot 3", "{2}",
     "1+1", "1-1", "1/2", "(2)", "2,3"],
)  # fmt: skip
def test_more_than_a_product_is_left_to_algebra(latex: str) -> None:
    assert read_radical(latex) is None


small = st.integers(min_value=1, max_value=60)


@pytest.mark.slow
@given(small, small, small, small, st.booleans(), st.booleans())
def test_products_are_equal_when_their_values_are(a: int, b: int, c: int, d: int, pi: bool, other_pi: bool) -> None:
    gold = rf"\frac{{{a}\sqrt{{{b}}}}}{{{c}}}" + (r"\pi" if pi else "")
    stated = (r"2\pi" if other_pi else "2") + rf"\sqrt{{{d}}}"
    same = compare(read_answer(gold), read_answer(stated))
    assert same is (a * a * b == 4 * d * c * c and pi == other_pi)
    values = (a * math.sqrt(b) / c * (math.pi if pi else 1), 2 * math.sqrt(d) * (math.pi if other_pi else 1))
    assert same is math.isclose(*values, rel_tol=1e-12)
