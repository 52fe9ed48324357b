"""Parses one number exactly, and compares two numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction

from gristmill_env.rewards.answers.dress import TEXT, undressed
from gristmill_env.rewards.answers.units import read_suffix

_MAX_CHARS = 150  # longer "numbers" are noise, and exact arithmetic on them is slow
_PLACES = 6  # as in Math-Verify, for a decimal compared with a fraction that does not terminate

_PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_SIGN = re.compile(r"([+-]?) ?[€£¥₹]? ?([+-]?)")
_LATEX_FRACTION = re.compile(rf"([0-9]*) ?\\frac ?\{{ ?(-?{_PLAIN}) ?\}} ?\{{ ?(-?{_PLAIN}) ?\}}")
_SLASHED = re.compile(rf"(?:([0-9]+) )?({_PLAIN}) ?/ ?({_PLAIN})")
_DECIMAL = re.compile(rf"({_PLAIN})(?:[eE]([+-]?[0-9]{{1,2}}))?(?![0-9A-Za-z,.])")


@dataclass(frozen=True)
class Number:
    """One exact number from an answer."""

    value: Fraction
    """The value as written, without the percent sign: 25 for "25%"."""
    percent: bool
    decimal: bool
    """Whether the number is written with digits and a point only, not as a fraction."""

    @property
    def latex(self) -> str:
        """The number as LaTeX for a symbolic check."""
        over, under = self.value.numerator, self.value.denominator
        if under == 1:
            text = str(over)
        elif self.decimal:  # a decimal must remain a decimal, because Math-Verify rounds decimals
            with localcontext(prec=2 * _MAX_CHARS):
                text = f"{Decimal(over) / Decimal(under):f}"
        else:
            text = rf"{'-' if over < 0 else ''}\frac{{{abs(over)}}}{{{under}}}"
        return text + r"\%" if self.percent else text


def read_number(text: str) -> Number | None:
    """Returns the number in `text`, or None if `text` is not one number and nothing else.

    Accepts decimals, correctly placed thousands separators, fractions (`9/7`, `\\frac{9}{7}`), mixed numbers (`3 1/2`),
    percents, a leading currency sign and a trailing unit. Rejects "72 or 73", "72,73", "1 234" and "72 million".
    """
    return undressed_number(undressed(text)) if len(text) <= _MAX_CHARS else None


def undressed_number(bare: str) -> Number | None:
    """Parses a number like `read_number`, from text already normalized by `undressed`."""
    if len(bare) > _MAX_CHARS:
        return None
    if inside := TEXT.fullmatch(bare):
        bare = inside[1].strip()
    signs = _SIGN.match(bare)
    assert signs is not None  # every part of the pattern is optional
    if signs[1] and signs[2]:
        return None
    body = bare[signs.end() :]
    sign = -1 if "-" in signs.groups() else 1
    if match := _LATEX_FRACTION.match(body) or _SLASHED.match(body):
        whole, over, under = Fraction(match[1] or 0), _plain(match[2]), _plain(match[3])
        if not under or (match[1] and not 0 <= over / under < 1):
            return None
        value, decimal = whole + over / under, False
    elif match := _DECIMAL.match(body):
        value, decimal = _plain(match[1]) * Fraction(10) ** int(match[2] or 0), True
    else:
        return None
    suffix = read_suffix(body[match.end() :])
    return None if suffix is None else Number(sign * value, percent=suffix == "percent", decimal=decimal)


def equal(gold: Number, stated: Number, tolerance: float = 0.0) -> bool:
    """Whether both are the same number, or |stated − gold| ≤ tolerance · |gold|.

    25% equals 0.25, and also 25, because reference answers often omit the sign when the question asks for a percentage.
    A decimal equals a fraction that does not terminate if both round to the same six places.
    """
    return any(_close(gold, g, stated, s, tolerance) for g, s in _readings(gold, stated))


def _plain(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _readings(gold: Number, stated: Number) -> list[tuple[Fraction, Fraction]]:
    """Returns pairs of values to compare. The second reading of a percent is the bare number, unless it is below 1."""
    readings = [(_ratio(gold), _ratio(stated))]
    if gold.percent != stated.percent and abs(gold.value) >= 1:
        readings.append((gold.value, stated.value))
    return readings


def _ratio(number: Number) -> Fraction:
    return number.value / 100 if number.percent else number.value


def _close(gold: Number, g: Fraction, stated: Number, s: Fraction, tolerance: float) -> bool:
    if abs(s - g) <= Fraction(tolerance) * abs(g):
        return True
    if gold.decimal == stated.decimal or _terminates(s if gold.decimal else g):
        return False
    return bool(g) == bool(s) and round(g, _PLACES) == round(s, _PLACES)


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
