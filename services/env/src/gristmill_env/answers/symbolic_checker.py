"""Equality by Math-Verify. Only processes of the symbolic pool import this module, because it imports sympy.

The checks run on the main thread of such a process. Math-Verify's own time limits are off, because they use SIGALRM.
The pool kills the process instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from gristmill_env.answers.comparison import compare, may_agree, read_answer
from gristmill_env.answers.latex import TWO_NUMBERS
from gristmill_env.answers.symbolic_pool import Check, Verdict

logging.getLogger("math_verify").setLevel(logging.ERROR)

_DEFAULTS = LatexExtractionConfig()
_LATEX = LatexExtractionConfig(normalization_config=replace(_DEFAULTS.normalization_config, units=False))
"""Without the units that Math-Verify omits: it takes the last letter of `3x + 2t` for one."""
_DIGITS = 30
_SMALL_OPERATIONS = 60
_SMALL_POWER = 12
_APART = sympy.Float("1e-12", _DIGITS)
_ROUNDED = sympy.Float("1e-3", _DIGITS)


def checker(settings: bytes) -> Callable[[bytes], bytes]:
    """Builds the parser, and returns the function of a process's jobs: encoded `Check` to value of an `Verdict`."""
    _decide(r"3\sqrt{2}", r"\frac{\sqrt{72}}{2}", 0.0)
    checks = msgspec.msgpack.Decoder(Check)
    return lambda body: decide(checks.decode(body)).value.encode()


def decide(check: Check) -> Verdict:
    """Decides whether all extracted answers equal their references. Stops at the first answer that does not."""
    one = _extract if check.extract else _decide
    outcomes = (one(gold, extracted, check.tolerance) for gold, extracted in check.pairs)
    return next((outcome for outcome in outcomes if outcome is not Verdict.SAME), Verdict.SAME)


@lru_cache(maxsize=2048)
def _decide(gold: str, extracted: str, tolerance: float) -> Verdict:
    golds = _parsed(gold)
    if golds is None:
        return Verdict.UNREADABLE_GOLD
    parsed = _parsed(extracted)
    if parsed is None:
        return Verdict.DIFFERENT
    if _close(golds[0], parsed[0], tolerance):
        return Verdict.SAME
    if _surely_different(golds[0], parsed[0]) or _far_apart(golds, parsed):
        return Verdict.DIFFERENT
    if _surely_same(golds[0], parsed[0]):
        return Verdict.SAME
    return Verdict.SAME if verify(golds, parsed, timeout_seconds=None) else Verdict.DIFFERENT


def _extract(gold: str, text: str, tolerance: float) -> Verdict:
    """Accepts the answers that Math-Verify's `parse` and `verify` accept with default settings, and answers within
    `tolerance`. Refuses answers that only look equal to Math-Verify."""
    golds, extracted = (parse(side, parsing_timeout=None) for side in (gold, text))
    if verify(golds, extracted, timeout_seconds=None):
        same = may_agree(*(read_answer(str(side[-1])) for side in (golds, extracted)))
        same = same and not (_is_joined(golds) or _is_joined(extracted) or _far_apart(golds, extracted))
    elif not golds or isinstance(golds[0], str):
        return Verdict.UNREADABLE_GOLD
    else:
        same = bool(extracted) and _close(golds[0], extracted[0], tolerance)
    return Verdict.SAME if same and _differ_by_units((gold, golds), (text, extracted), tolerance) else Verdict.DIFFERENT


def _differ_by_units(gold: tuple[str, list[Any]], other: tuple[str, list[Any]], tolerance: float) -> bool:
    """Whether Math-Verify omitted only units of two texts that it finds equal, and no letters of mathematics."""
    whole = [parse(text, [_LATEX, ExprExtractionConfig()], parsing_timeout=None) for text, _ in (gold, other)]
    if not all(whole) or all(str(a[-1]) == str(b[-1]) for a, (_, b) in zip(whole, (gold, other), strict=True)):
        return True
    one, other_answer = (read_answer(str(side[-1])) for side in whole)
    decision = compare(one, other_answer, tolerance)
    if isinstance(decision, bool):
        return decision
    return all(_decide(pair.gold, pair.extracted, tolerance) is Verdict.SAME for pair in decision)


def _is_joined(read: list[Any]) -> bool:
    """Whether Math-Verify added or multiplied two numbers with a blank between them: `1 234` becomes 235."""
    text = str(read[-1])
    return TWO_NUMBERS.search(text) is not None and str(read[0]) != text.replace(" ", "")


@lru_cache(maxsize=2048)
def _parsed(latex: str) -> list[Any] | None:
    """Returns Math-Verify's parse of `latex`; None when Math-Verify finds no mathematics in `latex`.

    `latex` is put in a box, because Math-Verify does not parse a bare `\\dfrac{9}{7}`.
    """
    read = parse(rf"\boxed{{{latex}}}", extraction_config=[_LATEX], parsing_timeout=None)
    return read if read and not isinstance(read[0], str) else None


def _surely_different(gold: Any, extracted: Any) -> bool:
    """Whether two expressions differ in value at a test point, so that no simplification can make them equal.

    Applies only to expressions that Math-Verify compares as values. Sets, relations and single letters are excluded,
    and so are decimals and percents, which Math-Verify rounds. `simplify` takes a hundred times as long to fail.
    """
    if not (_is_plain(gold) and _is_plain(extracted)):
        return False
    letters = sorted(gold.free_symbols | extracted.free_symbols, key=str)
    point = {letter: sympy.Rational(7 * n + 5, 11 * n + 13) for n, letter in enumerate(letters)}
    try:
        here, there = (side.subs(point).evalf(_DIGITS) for side in (gold, extracted))
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return False  # sympy cannot decide; Math-Verify may
    return _is_real(here) and _is_real(there) and bool(abs(here - there) > _APART * (1 + abs(here)))


def _far_apart(golds: list[Any], found: list[Any]) -> bool:
    """Whether two real numbers differ by a thousandth or more. Math-Verify rounds to six places, and so accepts
    0.0000001 as 0.0000002. Percents have two readings and are left to Math-Verify."""
    sides = (golds[0], found[0])
    if not all(isinstance(side, sympy.Expr) and side.is_number for side in sides) or "%" in f"{golds[-1]}{found[-1]}":
        return False
    try:
        here, there = (side.evalf(_DIGITS) for side in sides)
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return False
    return _is_real(here) and _is_real(there) and bool(abs(here - there) >= _ROUNDED * max(abs(here), abs(there)) > 0)


def _surely_same(gold: Any, extracted: Any) -> bool:
    """Whether two small polynomials have the same coefficients. Takes a tenth of the time of `simplify`."""
    if not (_is_plain(gold) and _is_plain(extracted)):
        return False
    difference = gold - extracted
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


def _close(gold: Any, extracted: Any, tolerance: float) -> bool:
    """Whether |extracted − gold| ≤ tolerance · |gold| for two real numbers."""
    if not tolerance or not all(isinstance(side, sympy.Expr) and side.is_number for side in (gold, extracted)):
        return False
    here, there = gold.evalf(_DIGITS), extracted.evalf(_DIGITS)
    return _is_real(here) and _is_real(there) and bool(abs(there - here) <= tolerance * abs(here))
