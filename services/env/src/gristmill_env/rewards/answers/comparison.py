"""Decides without algebra whether two answers are the same, or says what algebra has to decide."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill_env.rewards.answers.answer import Answer, read_answer
from gristmill_env.rewards.answers.dress import plain_words
from gristmill_env.rewards.answers.number import equal
from gristmill_env.rewards.answers.sequences import Elements


@dataclass(frozen=True)
class Pair:
    """A reference answer and a stated one, as LaTeX, whose equality only algebra can tell."""

    gold: str
    stated: str


Decision = bool | tuple[Pair, ...]
"""Same or not; or what is the same if every one of these pairs is."""


def compare(gold: Answer, stated: Answer, tolerance: float = 0.0) -> Decision:
    """Whether `stated` is the answer `gold`, which has to be readable.

    Numbers are compared exactly (see `number.equal`), and so are products of roots and π; `\\text{}` as
    words, tuples and intervals element by element; what is written alike is alike. The rest is left to algebra.
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
    """What is on the right of `x =`, when both name the same letter, or only one names any."""
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
    """Order and repetition mean nothing in a set."""
    if not all(answer.number is not None for answer in (*golds, *found)):
        return whole
    return all(any(compare(one, other, tolerance) for other in found) for one in golds) and all(
        any(compare(one, other, tolerance) for one in golds) for other in found
    )
