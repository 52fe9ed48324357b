"""One number, exactly, however it is written."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_env.answers.numbers import Number, equal, read_number

NUMBERS = [
    ("72", 72), ("72.", 72), ("72.00", 72), ("072", 72), ("+72", 72), ("-5", -5), ("- 5", -5), ("−5", -5), ("–5", -5),
    ("-$5", -5), ("$-5", -5), (r"\$72", 72), ("$72$", 72), ("€72", 72), ("72 €", 72), ("£1,000", 1000),
    (r"\(72\)", 72), (r"\[72\]", 72), ("$$72$$", 72), ("**72**", 72), ("`72`", 72), ("__72__", 72), (r"\text{72}", 72),
    ("1,234", 1234), ("1,234,567.5", "1234567.5"), (r"1{,}234", 1234), (r"1,\!234", 1234), (r"1\,234", 1234),
    (".5", "0.5"), ("5.", 5), ("1e5", 100000), ("2.5E-3", "0.0025"),
    ("9/7", "9/7"), ("-9/7", "-9/7"), ("9 / 7", "9/7"), (r"\frac{9}{7}", "9/7"), (r"\dfrac97", "9/7"),
    (r"\tfrac{9}7", "9/7"), (r"-\frac{9}{7}", "-9/7"), (r"\frac{-9}{7}", "-9/7"), (r"\frac{1.5}{2}", "3/4"),
    (r"\frac 1 2", "1/2"), ("½", "1/2"),
    ("3 1/2", "7/2"), (r"3\frac{1}{2}", "7/2"), (r"-3\frac12", "-7/2"), ("2½", "5/2"),
    ("72 apples", 72), ("72 km/h", 72), ("72 miles per hour", 72), ("5 cups of flour", 5), (r"72\text{ cm}", 72),
    (r"72\text{ m}", 72), (r"72\,\mathrm{cm}^2", 72), ("72 cm²", 72), (r"72^\circ", 72),
    (r"72^{\circ}", 72), ("72°", 72), ("72 degrees", 72), ("2/3 cup", "2/3"), ("$72 dollars", 72),
]  # fmt: skip
PERCENTS = ["25%", r"25\%", "25 %", "25 percent", r"25\text{ percent}", r"$25\%$"]
NO_NUMBERS = [
    "", "x", "72 or 73", "72 and 73", "72, 73", "72,73", "12,34", "1,2345", "1 234", "72 million", "72 thousand",
    "72 dozen", "72 hundredths", "72 squared", "72x", "72 x", "72m", "72!", "3^2", "2**3", "72 is wrong", "not 72",
    "about 72", "1.2.3", "1.234,56", "--5", "-+5", "1/0", r"\frac{1}{0}", "1/2/3", "1/2x", r"\frac{1}{2}x", "3 4/3",
    "1e999", "0x10", "1_000", "٧٢", "七十二", "72 (b)", r"\frac{1}{x}", "½x", "10:30", "9" * 200, "1 1", "+", "-", "$",
    ".", ",", "%",
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_read_number_reads_a_number_exactly(text: str, value: int | str) -> None:
    number = read_number(text)
    assert number is not None
    assert (number.value, number.percent) == (Fraction(value), False)


@pytest.mark.parametrize("text", PERCENTS)
def test_number_with_a_percent_sign_is_marked_as_percent(text: str) -> None:
    assert read_number(text) == Number(Fraction(25), percent=True, decimal=True)


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_text_that_is_not_one_number_has_no_value(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("gold", "stated", "same"),
    [
        ("25%", "25%", True), ("25%", "0.25", True), ("25%", "25", True), ("25", "25%", True), ("0.25", "25%", True),
        ("1/4", "25%", True), ("25%", "26%", False), ("0.5", "0.5%", False), ("0.5%", "0.5", False),
        ("2500%", "25", True), ("2500%", "2500", True),
        ("1/3", "0.333333", True), ("0.333333", "1/3", True), ("1/3", "0.3333333333", True), ("1/3", "0.33333", False),
        ("2/3", "0.666667", True), ("2/3", "0.666666", False), ("1/2", "0.5000001", False), ("0.5", "1/2", True),
        ("1/30000000", "0", False), ("0", "1/30000000", False), ("33.333333%", "1/3", True),
    ],
)  # fmt: skip
def test_percents_and_repeating_decimals_are_compared_with_fractions(gold: str, stated: str, same: bool) -> None:
    one, other = read_number(gold), read_number(stated)
    assert one is not None
    assert other is not None
    assert equal(one, other) is same


decimals = st.decimals(min_value=-(10**9), max_value=10**9, allow_nan=False, allow_infinity=False, places=4)


@st.composite
def dressed(draw: st.DrawFn, value: Decimal) -> str:
    """`value`, written in one of the ways that mean it."""
    digits = f"{abs(value):{draw(st.sampled_from([',', '']))}f}"
    if draw(st.booleans()):
        digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    digits += draw(st.sampled_from(["", "0", "00"])) if "." in digits else draw(st.sampled_from(["", ".", ".0"]))
    digits = digits.replace(",", draw(st.sampled_from([",", "{,}", r",\!", r"\,"])))
    sign = draw(st.sampled_from(["-", "−", "- "])) if value < 0 else draw(st.sampled_from(["", "+"]))
    around = [("", ""), ("$", "$"), (r"\(", r"\)"), ("**", "**"), ("`", "`"), ("", r"\text{ cm}"), ("", " hats")]
    before, after = draw(st.sampled_from(around))
    currency, end = draw(st.sampled_from(["", "$", "€"])), draw(st.sampled_from(["", ".", ","]))
    return f"{before}{sign}{currency}{digits}{after}{end}"


@pytest.mark.slow
@given(decimals.flatmap(lambda value: st.tuples(st.just(value), dressed(value))))
def test_equal_numbers_in_different_notations_are_equal(case: tuple[Decimal, str]) -> None:
    value, text = case
    number = read_number(text)
    assert number is not None, text
    assert number.value == Fraction(value)
    assert read_number(number.latex) == number


@given(decimals, decimals)
def test_different_numbers_are_never_equal(one: Decimal, other: Decimal) -> None:
    gold, stated = read_number(str(one)), read_number(f"{other:,f}")
    assert gold is not None
    assert stated is not None
    assert equal(gold, stated) is (one == other)


@pytest.mark.slow
@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_fractions_are_equal_when_their_values_are(one: Fraction, other: Fraction) -> None:
    gold, stated = read_number(f"{one.numerator}/{one.denominator}"), read_number(
        rf"\frac{{{other.numerator * 3}}}{{{other.denominator * 3}}}"
    )  # fmt: skip
    assert gold is not None
    assert stated is not None
    assert equal(gold, stated) is (one == other)


@pytest.mark.slow
@given(st.text(max_size=40))
def test_read_number_reads_any_text_without_an_error(text: str) -> None:
    number = read_number(text)
    assert number is None or isinstance(number.value, Fraction)
