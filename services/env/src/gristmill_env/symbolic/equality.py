"""Equality by Math-Verify. Imports sympy: for the processes of the symbolic pool only, on whose main thread it runs.

Math-Verify's own time limits are off (they take SIGALRM); the process is killed instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from gristmill_env.symbolic.protocol import Check, Outcome, decode_check

logging.getLogger("math_verify").setLevel(logging.ERROR)

_LATEX = [LatexExtractionConfig()]
_DIGITS = 30
_SMALL_OPERATIONS = 60
_SMALL_POWER = 12
_APART = sympy.Float("1e-12", _DIGITS)


def checker(settings: bytes) -> Callable[[bytes], bytes]:
    """The function of a process' jobs: an encoded `Check` to the value of an `Outcome`. Has the parser built first."""
    _decide(r"3\sqrt{2}", r"\frac{\sqrt{72}}{2}", 0.0)
    return lambda body: decide(decode_check(body)).value.encode()


def decide(check: Check) -> Outcome:
    """Whether all stated answers are the same as their references; stops at the first that is not."""
    one = _extract if check.extract else _decide
    outcomes = (one(gold, stated, check.tolerance) for gold, stated in check.pairs)
    return next((outcome for outcome in outcomes if outcome is not Outcome.SAME), Outcome.SAME)


@lru_cache(maxsize=2048)
def _decide(gold: str, stated: str, tolerance: float) -> Outcome:
    golds = _parsed(gold)
    if golds is None:
        return Outcome.UNREADABLE_GOLD
    found = _parsed(stated)
    if found is None:
        return Outcome.DIFFERENT
    if _close(golds[0], found[0], tolerance):
        return Outcome.SAME
    if _surely_different(golds[0], found[0]):
        return Outcome.DIFFERENT
    if _surely_same(golds[0], found[0]):
        return Outcome.SAME
    return Outcome.SAME if verify(golds, found, timeout_seconds=None) else Outcome.DIFFERENT


def _extract(gold: str, text: str, tolerance: float) -> Outcome:
    """Exactly what Math-Verify's `parse` and `verify` accept with their own settings, and more only by `tolerance`."""
    golds, found = (parse(side, parsing_timeout=None) for side in (gold, text))
    if verify(golds, found, timeout_seconds=None):
        return Outcome.SAME
    if not golds or isinstance(golds[0], str):
        return Outcome.UNREADABLE_GOLD
    return Outcome.SAME if found and _close(golds[0], found[0], tolerance) else Outcome.DIFFERENT


@lru_cache(maxsize=2048)
def _parsed(latex: str) -> list[Any] | None:
    """Math-Verify's reading of `latex`; None when it finds no mathematics in it.

    In a box: a bare `\\dfrac{9}{7}` parses to nothing.
    """
    read = parse(rf"\boxed{{{latex}}}", extraction_config=_LATEX, parsing_timeout=None)
    return read if read and not isinstance(read[0], str) else None


def _surely_different(gold: Any, stated: Any) -> bool:
    """Whether two expressions differ in value at some point: then no simplifying can make them equal.

    Only of what Math-Verify compares as values: no sets, relations, single letters; nothing with
    decimals or percents, which it rounds. `simplify` takes a hundred times as long to fail.
    """
    if not (_is_plain(gold) and _is_plain(stated)):
        return False
    letters = sorted(gold.free_symbols | stated.free_symbols, key=str)
    point = {letter: sympy.Rational(7 * n + 5, 11 * n + 13) for n, letter in enumerate(letters)}
    try:
        here, there = (side.subs(point).evalf(_DIGITS) for side in (gold, stated))
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return False  # sympy cannot say; Math-Verify may
    return _is_real(here) and _is_real(there) and bool(abs(here - there) > _APART * (1 + abs(here)))


def _surely_same(gold: Any, stated: Any) -> bool:
    """Whether two small polynomials have the same coefficients, which takes a tenth of the time of `simplify`."""
    if not (_is_plain(gold) and _is_plain(stated)):
        return False
    difference = gold - stated
    letters = difference.free_symbols
    if not difference.is_polynomial(*letters) or difference.count_ops() > _SMALL_OPERATIONS:
        return False
    if any(power.exp > _SMALL_POWER for power in difference.atoms(sympy.Pow) if power.exp.is_Integer):
        return False
    return bool(difference.expand() == 0)


def _is_plain(side: Any) -> bool:
    return (
        isinstance(side, sympy.Expr)
        and not isinstance(side, sympy.Symbol)
        and not side.has(sympy.Float, sympy.UnevaluatedExpr, sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit)
    )


def _is_real(value: Any) -> bool:
    return bool(value.is_Float or value.is_Integer)


def _close(gold: Any, stated: Any, tolerance: float) -> bool:
    """|stated − gold| ≤ tolerance · |gold|, of two real numbers."""
    if not tolerance or not all(isinstance(side, sympy.Expr) and side.is_number for side in (gold, stated)):
        return False
    here, there = gold.evalf(_DIGITS), stated.evalf(_DIGITS)
    return _is_real(here) and _is_real(there) and bool(abs(there - here) <= tolerance * abs(here))
