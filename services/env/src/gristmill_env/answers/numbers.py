"""Numbers in answers, parsed and compared exactly: decimals, fractions, percents, units, products of roots and π."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from math import prod
from typing import Literal

from gristmill_env.answers.latex import LETTER_FONT, OTHER_NUMBER, TEXT, normalize_latex

_MAX_CHARS = 150  # longer "numbers" are noise, and exact arithmetic on them is slow
_PLACES = 6  # as in Math-Verify, for a decimal compared with a fraction that does not terminate
_APART = 1000  # six places of 0.0000004 and of 1/3000000 are 0.000000

_PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_SIGN = re.compile(r"([+-]?) ?[€£¥₹]? ?([+-]?)")
_LATEX_FRACTION = re.compile(rf"([0-9]*) ?\\frac ?\{{ ?(-?{_PLAIN}) ?\}} ?\{{ ?(-?{_PLAIN}) ?\}}")
_SLASHED = re.compile(rf"(?:([0-9]+) )?({_PLAIN}) ?/ ?({_PLAIN})")
_POWER_OF_TEN = r"10 ?\^ ?(?:\{ ?([+-]?[0-9]{1,3}) ?\}|([0-9]))"
_DECIMAL = re.compile(rf"({_PLAIN})(?:[eE]([+-]?[0-9]{{1,3}}))?(?![0-9A-Za-z,.])")
_SCIENTIFIC = re.compile(rf"(?:({_PLAIN}) ?(?:\\times|\\cdot|\*)(?![A-Za-z]) ?)?{_POWER_OF_TEN}(?![0-9A-Za-z,.!^])")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*) ?\\(?:overline|bar|dot) ?(?:\{ ?([0-9]+) ?\}|([0-9]))(?![0-9A-Za-z,.!^])")
_DOUBLE_FACTORIAL = re.compile(r"([0-9]{1,2}) ?!!(?![0-9A-Za-z!^])")
_MAX_EXPONENT = 308


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
    return normalized_number(normalize_latex(text)) if len(text) <= _MAX_CHARS else None


def normalized_number(bare: str) -> Number | None:
    """Parses a number like `read_number`, from text already normalized by `normalize_latex`."""
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
        value: Fraction | None = whole + over / under
        decimal = False
    elif match := _DOUBLE_FACTORIAL.match(body):
        value, decimal = Fraction(prod(range(int(match[1]), 0, -2))), False
    elif match := _REPEATING.match(body):
        value, decimal = _repeating(match[1] or "0", match[2], match[3] or match[4]), False
    elif match := _SCIENTIFIC.match(body):
        value, decimal = _shifted(match[1] or "1", match[2] or match[3]), True
    elif match := _DECIMAL.match(body):
        value, decimal = _shifted(match[1], match[2] or "0"), True
    else:
        return None
    suffix = read_suffix(body[match.end() :])
    if value is None or suffix is None:
        return None
    return Number(sign * value, percent=suffix == "percent", decimal=decimal)


def equal(gold: Number, extracted: Number, tolerance: float = 0.0) -> bool:
    """Whether both are the same number, or |extracted − gold| ≤ tolerance · |gold|.

    25% equals 0.25, and also 25, because reference answers often omit the sign when the question asks for a percentage.
    A decimal equals a fraction that does not terminate if both round to the same six places and differ by less than a
    thousandth.
    """
    return any(_close(gold, g, extracted, s, tolerance) for g, s in _readings(gold, extracted))


def _plain(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _shifted(digits: str, exponent: str) -> Fraction | None:
    return _plain(digits) * Fraction(10) ** int(exponent) if abs(int(exponent)) <= _MAX_EXPONENT else None


def _repeating(whole: str, before: str, period: str) -> Fraction:
    """Returns the value of a decimal whose last digits repeat: 0.1666... for `0.1\\overline{6}`."""
    once = int(whole + before + period) - int(whole + before)
    return Fraction(once, (10 ** len(period) - 1) * 10 ** len(before))


def _readings(gold: Number, extracted: Number) -> list[tuple[Fraction, Fraction]]:
    """Returns pairs of values to compare. The second reading of a percent is the bare number, unless it is below 1."""
    readings = [(_ratio(gold), _ratio(extracted))]
    if gold.percent != extracted.percent and abs(gold.value) >= 1:
        readings.append((gold.value, extracted.value))
    return readings


def _ratio(number: Number) -> Fraction:
    return number.value / 100 if number.percent else number.value


def _close(gold: Number, g: Fraction, extracted: Number, s: Fraction, tolerance: float) -> bool:
    if abs(s - g) <= Fraction(tolerance) * abs(g):
        return True
    if gold.decimal == extracted.decimal or _terminates(s if gold.decimal else g):
        return False
    return round(g, _PLACES) == round(s, _PLACES) and abs(g - s) * _APART < abs(g)


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


_TOKEN = re.compile(
    r" ?(?:(?P<integer>[0-9]{1,20})(?![0-9.!^])|\\sqrt ?\{ ?(?P<root>[0-9]{1,20}) ?\}|(?P<pi>\\pi)(?![A-Za-z])"
    r"|(?P<fraction>\\frac ?\{)|(?P<times>\\(?:cdot|times)(?![A-Za-z])|\*)|(?P<over>\} ?\{)|(?P<close>\})) ?"
)


@dataclass(frozen=True)
class Radical:
    """The number sign · √square · π^pi. Equal values have equal fields, because π is transcendental."""

    sign: int
    square: Fraction
    pi: int = 0

    def __mul__(self, other: Radical) -> Radical:
        sign = self.sign * other.sign
        return Radical(sign, self.square * other.square, self.pi + other.pi if sign else 0)

    def over(self, other: Radical) -> Radical:
        """Returns this number divided by `other`, which is not 0."""
        return self * Radical(other.sign, 1 / other.square, -other.pi)


def radical_of(number: Number) -> Radical | None:
    """Converts a number to a Radical. Returns None for a percent, and for a decimal, which may be a rounded value."""
    if number.percent or (number.decimal and number.value.denominator != 1):
        return None
    return Radical((number.value > 0) - (number.value < 0), number.value**2)


def read_radical(latex: str) -> Radical | None:
    """Returns the product in `latex`, or None if `latex` is not only a product or is ambiguous."""
    body = latex.removeprefix("-")
    tokens: list[re.Match[str]] = []
    at = 0
    while at < len(body):
        token = _TOKEN.match(body, at)
        if token is None:
            return None
        tokens.append(token)
        at = token.end()
    tokens.reverse()
    product = _product(tokens)
    if product is None or tokens:
        return None
    return Radical(-1, Fraction(1)) * product if body != latex else product


def _product(tokens: list[re.Match[str]]) -> Radical | None:
    """Takes the factors of one product from the end of `tokens`. A number or fraction is a factor only at the start and
    after a multiplication sign. A fraction after a number may be a mixed number."""
    product: Radical | None = None
    joined = True
    while tokens and not (tokens[-1]["over"] or tokens[-1]["close"]):
        token = tokens.pop()
        if token["times"]:
            if joined:
                return None
            joined = True
            continue
        if (token["integer"] or token["fraction"]) and not joined:
            return None
        factor = _fraction(tokens) if token["fraction"] else _factor(token)
        if factor is None:
            return None
        product = factor if product is None else product * factor
        joined = False
    return None if joined else product


def _factor(token: re.Match[str]) -> Radical:
    if token["pi"]:
        return Radical(1, Fraction(1), 1)
    square = Fraction(token["root"] or int(token["integer"]) ** 2)
    return Radical(int(square > 0), square)


def _fraction(tokens: list[re.Match[str]]) -> Radical | None:
    over = _product(tokens)
    if over is None or not tokens or not tokens.pop()["over"]:
        return None
    under = _product(tokens)
    if under is None or not under.sign or not tokens or not tokens.pop()["close"]:
        return None
    return over.over(under)


Suffix = Literal["nothing", "percent", "unit"]

_PERCENT = re.compile(r"\\?%|percent|per cent|percentage points?", re.IGNORECASE)
_DEGREES = re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\}) ?[CF]?|degrees?(?: (?:celsius|fahrenheit))?", re.IGNORECASE)
_POWER = re.compile(r"\^ ?(?:\{ ?-?[1-3] ?\}|[23])")
_BETWEEN = re.compile(r"(?:[\s/.-]|\\cdot(?![A-Za-z]))+")
_QUOTIENT = re.compile(r"\\frac ?\{([^{}]*)\} ?\{([^{}]*)\}")
_SHORT = re.compile(r"cm|mm|km|kg|mg|ml|mL|ft|in|lb|oz|hr|yd|mi|GB|MB|TB")
_SYMBOL = re.compile(rf"{_SHORT.pattern}|[mshgL]")
_SHORT_LATER = re.compile(rf"{_SYMBOL.pattern}|[ACFHJKNTVW]|Hz|Pa|of|a|per")
_MAX_WORDS = 4


def read_suffix(rest: str) -> Suffix | None:
    """Returns the kind of the text after a number; None if the text may change the number: "or 73", "million", "x^2".

    The kind of unit is ignored, as in the graders of MATH. A letter next to a number is algebra: `72m`, but not `72 m`.
    """
    opened = _QUOTIENT.sub(r" \1/\2 ", TEXT.sub(r" \1 ", rest))
    bare = opened.strip()
    if not bare:
        return "nothing"
    if _PERCENT.fullmatch(bare):
        return "percent"
    if _DEGREES.fullmatch(bare) or bare in "€£¥₹":
        return "unit"
    if opened[0] != " " or LETTER_FONT.search(rest):  # 72x is algebra; 72 boxes is not
        return None
    words = [word for word in _BETWEEN.split(_POWER.sub("", bare)) if word]
    if not words or len(words) > _MAX_WORDS or any(map(OTHER_NUMBER.fullmatch, words)):
        return None
    first_short = _SHORT_LATER if opened != rest else _SYMBOL
    are_units = [_is_unit(words[0], first_short), *(_is_unit(word, _SHORT_LATER) for word in words[1:])]
    return "unit" if all(are_units) else None


def _is_unit(word: str, short: re.Pattern[str]) -> bool:
    return short.fullmatch(word) is not None or (len(word) > 2 and word.isascii() and word.isalpha())
