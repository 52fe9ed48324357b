"""A reward for a final answer with the same text as the row's answer."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

from gristmill_env.answers.extraction import after_thinking, final_answer, gold_answer
from gristmill_env.answers.latex import TEXT, undressed
from gristmill_env.rewards.registry import reward


def _stated(
    completion: str,
    row: Mapping[str, Any],
    *,
    ignore_case: bool = True,
    ignore_punctuation: bool = False,
    whole_if_unmarked: bool = True,
) -> str | None:
    stated = _said(completion, whole_if_unmarked)
    return None if stated is None else _normal(stated, ignore_case, ignore_punctuation) or None


@reward("exact_match", states=_stated)
def exact_match(
    completion: str,
    answer: str,
    *,
    ignore_case: bool = True,
    ignore_punctuation: bool = False,
    whole_if_unmarked: bool = True,
) -> float | None:
    """1 when the completion's final answer reads as the row's: same words, single blanks, no punctuation at the end.

    None (no score) when the row's answer is empty. Options: `ignore_case`; `ignore_punctuation`
    leaves out all of it, not only at the end; `whole_if_unmarked` compares the whole completion,
    after its reasoning, when it marks no answer, else such a completion is 0.
    """
    gold = _normal(gold_answer(answer), ignore_case, ignore_punctuation)
    if not gold:
        return None
    stated = _said(completion, whole_if_unmarked)
    return float(stated is not None and _normal(stated, ignore_case, ignore_punctuation) == gold)


def _said(completion: str, whole_if_unmarked: bool) -> str | None:
    stated = final_answer(completion)
    return after_thinking(completion) if stated is None and whole_if_unmarked else stated


def _normal(text: str, ignore_case: bool, ignore_punctuation: bool) -> str:
    text = TEXT.sub(r"\1", undressed(text))
    if ignore_punctuation:
        text = "".join(char for char in text if not unicodedata.category(char).startswith("P"))
    text = " ".join(text.split()).rstrip(".,;:!? ")
    return text.casefold() if ignore_case else text
