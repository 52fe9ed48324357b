"""Decides without algebra whether two answers are equal, or returns the pairs that algebra must decide."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill_env.rewards.answers.answer import Answer, read_answer
from gristmill_env.rewards.answers.dress import plain_words
from gristmill_env.rewards.answers.number import equal
from gristmill_env.rewards.answers.sequences import Elements


@dataclass(frozen=True)
class Pair:
    """A reference answer and an extracted answer, as LaTeX. Only algebra can decide whether they are equal."""

    gold: str
    stated: str


Decision = bool | tuple[Pair, ...]
"""True if equal, False if not; or pairs, if the answers are equal exactly when every pair is equal."""


def compare(gold: Answer, stated: Answer, tolerance: float = 0.0) -> Decision:
    """Decides whether `stated` equals the answer `gold`, which must be readable.

    Numbers (see `number.equal`) and products of roots and π are compared exactly. `\\text{}` is compared as words,
    tuples and intervals element by element. Answers with the same text are equal. Algebra decides all other cases.
    """
    if gold.number is not None and stated.number is not None:
        return equal(gold.number, stated.number, tolerance)
    if gold.words is not None:
        return plain_words(stated.bare) == gold.words
    if gold.tight == stated.tight:
        return True
    if gold.latex is None or stated.latex is None:
        return False
    if gold.radical is not None and stated.radical is not None and not tolerance:
        return gold.radical == stated.radical
    whole = (Pair(gold.latex, stated.latex),)
    if unwrapped := _values(gold, stated):
        return compare(*unwrapped, tolerance)
    if gold.elements is not None and stated.elements is not None:
        return _compare_elements(gold.elements, stated.elements, whole, tolerance)
    return whole


def _values(gold: Answer, stated: Answer) -> tuple[Answer, Answer] | None:
    """Returns both values without `x =`, if both answers name the same letter or only one names a letter."""
    if gold.named and stated.named:
        return (gold.named[1], stated.named[1]) if gold.named[0] == stated.named[0] else None
    if gold.named and not stated.is_relation:
        return gold.named[1], stated
    if stated.named and not gold.is_relation:
        return gold, stated.named[1]
    return None


def _compare_elements(gold: Elements, stated: Elements, whole: tuple[Pair, ...], tolerance: float) -> Decision:
    if gold.brackets != stated.brackets:
        return whole
    golds, found = ([read_answer(item) for item in side.items] for side in (gold, stated))
    if not all(answer.readable for answer in golds):
        return whole
    if not gold.ordered:
        return _same_set(golds, found, whole, tolerance)
    if len(golds) != len(found):
        return False
    asked: list[Pair] = []
    for one, other in zip(golds, found, strict=True):
        decision = compare(one, other, tolerance)
        if decision is False:
            return False
        if decision is not True:
            asked.extend(decision)
    return tuple(asked) or True


def _same_set(golds: list[Answer], found: list[Answer], whole: tuple[Pair, ...], tolerance: float) -> Decision:
    """Compares two sets of numbers without regard to order and repetition."""
    if not all(answer.number is not None for answer in (*golds, *found)):
        return whole
    return all(any(compare(one, other, tolerance) for other in found) for one in golds) and all(
        any(compare(one, other, tolerance) for one in golds) for other in found
    )
