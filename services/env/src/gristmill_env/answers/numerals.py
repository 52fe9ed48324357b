"""Parses numerals whose base is written: `2516_8`, `1A_{16}`, `101 (base 2)`, `0x1F`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from gristmill_env.answers.latex import TEXT

_WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16, "twenty": 20,
    "bin": 2, "binary": 2, "oct": 8, "octal": 8, "dec": 10, "decimal": 10, "hex": 16, "hexadecimal": 16,
}  # fmt: skip
_DIGITS = r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9A-Za-z]{1,100})(?:\.[0-9A-Za-z]{1,100})?)"
_NUMERAL = re.compile(
    rf"(?P<sign>-?) ?(?P<opened>[({{])? ?{_DIGITS} ?(?P<closed>[)}}])?"
    r"(?: ?_ ?(?:(?P<one>[0-9])|\{ ?\(? ?(?:base[ -]?)?(?P<base>[0-9]{1,2}|[a-z]{3,11}) ?\)? ?\})"
    r"| ?[( ] ?(?:in )?base[ -]?(?P<said>[0-9]{1,2}|[a-z]{3,11}) ?\)?)"
)
_PREFIXED = re.compile(
    r"(?P<sign>-?) ?0(?:x(?P<hex>[0-9a-f]{1,100})|o(?P<oct>[0-7]{1,100})|b(?P<bin>[01]{1,100}))", re.I
)
_BASE = {"hex": 16, "oct": 8, "bin": 2}


@dataclass(frozen=True)
class Numeral:
    """One number and the base in which it is written. The base is a part of the answer."""

    value: Fraction
    base: int


def read_numeral(bare: str) -> Numeral | None:
    """Returns the numeral in `bare`, normalized by `normalize_latex`; None without a base, or if a digit is not valid
    in the base.

    Letters with a subscript, such as `x_1` and `A_{12}`, are variables unless there are several letters and each is a
    digit of the base.
    """
    plain = " ".join(TEXT.sub(r" \1 ", bare).split())
    if match := _PREFIXED.fullmatch(plain):
        assert match.lastgroup is not None
        return _numeral(match["sign"], match[match.lastgroup], _BASE[match.lastgroup])
    match = _NUMERAL.fullmatch(plain)
    if match is None or (match["opened"] or "") + (match["closed"] or "") not in ("", "()", "{}"):
        return None
    base = match["one"] or match["base"] or match["said"]
    digits = match["digits"].replace(",", "")
    if len(digits) == 1 and digits.isalpha():
        return None
    return _numeral(match["sign"], digits, int(base) if base.isdigit() else _WORDS.get(base, 0))


def _numeral(sign: str, digits: str, base: int) -> Numeral | None:
    whole, _, part = digits.partition(".")
    try:
        value = Fraction(int(whole + part, base)) / Fraction(base) ** len(part) if 2 <= base <= 36 else None
    except ValueError:
        return None
    return None if value is None else Numeral(-value if sign else value, base)
