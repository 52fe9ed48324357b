"""Completions to check, with the mix of answers that data sets of mathematics have.

GSM8K-like: problems of reasoning_gym's gsm_symbolic. MATH-like: final answers in LaTeX, by kind (`KINDS`). Half of each
problem's completions are right, in one of several notations. Each wrong completion states a different wrong answer, so
caches of earlier checks help little.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

COMPLETIONS = 8
"""Completions per problem."""
_MARKS = ("#### {}", "The answer is {}.", "The answer is ${}.", r"\boxed{{{}}}", "<answer>{}</answer>")
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)

Numbers = tuple[int, int, int]
"""The numbers from which an answer is made."""


@dataclass(frozen=True)
class Case:
    """One completion, the answer of its row, and the expected accuracy."""

    completion: str
    answer: str
    right: bool
    alike: bool
    """Whether the completion states the answer in the row's notation."""


@dataclass(frozen=True)
class Kind:
    """A kind of answer in LaTeX."""

    name: str
    share: float
    writings: Callable[[Numbers], list[str]]
    """Returns equal notations of the answer that the numbers make. The row has the first notation."""


def _integer(n: Numbers) -> list[str]:
    value = n[0] * 37
    return [f"{value}", f"{value:,}", f"{value}.0"]


def _fraction(n: Numbers) -> list[str]:
    value = Fraction(n[0], n[1] + 50)
    over, under = value.numerator, value.denominator
    return [rf"\frac{{{over}}}{{{under}}}", rf"\dfrac{{{over * 2}}}{{{under * 2}}}", f"{over}/{under}"]


def _decimal(n: Numbers) -> list[str]:
    value = f"{n[0]}.{n[1]}7"
    return [value, f"{value}0", rf"{value}\text{{ cm}}"]


def _surd(n: Numbers) -> list[str]:
    a, root = n[0], _PRIMES[n[1] % len(_PRIMES)]
    return [rf"{a}\sqrt{{{root}}}", rf"\sqrt{{{a * a * root}}}", rf"\sqrt{{{root}}} \cdot {a}"]


def _of_pi(n: Numbers) -> list[str]:
    return [rf"{n[0]}\pi", rf"\pi \cdot {n[0]}", rf"\frac{{{2 * n[0]}\pi}}{{2}}"]


def _interval(n: Numbers) -> list[str]:
    a, b = n[0], n[0] + n[1]
    return [f"[{a}, {b})", rf"\left[{a},{b}\right)", f"[{a}.0, {b})"]


def _tuple(n: Numbers) -> list[str]:
    a, b = n[:2]
    return [rf"({a}, {b}\sqrt{{2}})", rf"({a}, \sqrt{{{2 * b * b}}})", rf"\left({a},{b} \sqrt{{2}}\right)"]


def _list(n: Numbers) -> list[str]:
    a, b = n[0], n[0] + n[1]
    return [f"{a}, {b}", f"{b}, {a}", rf"{a} \text{{ and }} {b}"]


def _polynomial(n: Numbers) -> list[str]:
    a, b, c = n[:3]
    return [f"{a}x^2+{b}x-{c}", f"-{c}+{a}x^2+{b}x", f"x({a}x+{b})-{c}"]


KINDS = (
    Kind("integers", 0.50, _integer),
    Kind("fractions", 0.15, _fraction),
    Kind("decimals and units", 0.07, _decimal),
    Kind("surds", 0.08, _surd),
    Kind("multiples of π", 0.03, _of_pi),
    Kind("intervals", 0.05, _interval),
    Kind("tuples with surds", 0.04, _tuple),
    Kind("lists", 0.03, _list),
    Kind("polynomials", 0.05, _polynomial),
)
"""An estimate of the mix of answers in MATH. Shares add up to one."""


def gsm8k_like(problems: int, seed: int) -> list[Case]:
    """Returns cases from gsm_symbolic. Completions mark their answers in the usual ways."""
    import reasoning_gym

    chance = random.Random(seed)
    cases = []
    for row in reasoning_gym.create_dataset("gsm_symbolic", size=problems, seed=seed):
        solution = row["metadata"]["answer_cot"]
        reasoning, _, number = solution.rpartition("#### ")
        for n in range(COMPLETIONS):
            right = n % 2 == 0
            stated = number if right else f"{number}{chance.randrange(1, 999)}"
            cases.append(Case(reasoning + chance.choice(_MARKS).format(stated), solution, right, alike=right))
    return cases


def math_like(problems: int, seed: int) -> list[Case]:
    """Returns cases with answers of all kinds, in boxes after some reasoning."""
    chance = random.Random(seed)
    cases = []
    for _ in range(problems):
        (kind,) = chance.choices(KINDS, [kind.share for kind in KINDS])
        writings = kind.writings(_numbers(chance))
        for n in range(COMPLETIONS):
            right = n % 2 == 0
            stated = chance.choice(writings if right else _others(kind, writings[0], chance))
            completion = f"We simplify step by step, and find what was asked for.\nSo it is $\\boxed{{{stated}}}$."
            cases.append(Case(completion, writings[0], right, alike=stated == writings[0]))
    return cases


def _others(kind: Kind, not_this: str, chance: random.Random) -> list[str]:
    while (writings := kind.writings(_numbers(chance)))[0] == not_this:
        pass
    return writings


def _numbers(chance: random.Random) -> Numbers:
    return chance.randrange(2, 500), chance.randrange(2, 500), chance.randrange(2, 500)
