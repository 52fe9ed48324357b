"""Products of fractions, square roots and π, compared exactly: `\\frac{3\\sqrt{2}}{2}` is `\\frac{3}{\\sqrt{2}}`.

Most answers that are not fractions have this form. Algebra takes a thousand times as long for each answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from gristmill_env.rewards.answers.number import Number

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
