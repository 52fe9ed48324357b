"""Parses the text after a number: recognizes percent, and drops degrees and units."""

from __future__ import annotations

import re
from typing import Literal

from gristmill_env.rewards.answers.dress import TEXT

Suffix = Literal["nothing", "percent", "unit"]

_PERCENT = re.compile(r"\\?%|percent|per cent|percentage points?", re.IGNORECASE)
_DEGREES = re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\}) ?[CF]?|degrees?(?: (?:celsius|fahrenheit))?", re.IGNORECASE)
_POWER = re.compile(r"\^\{?[23]\}?")
_BETWEEN = re.compile(r"[\s/.-]+")
_SHORT = re.compile(r"cm|mm|km|kg|mg|ml|mL|ft|in|lb|oz|hr|yd|mi|GB|MB|TB")
_SHORT_LATER = re.compile(rf"{_SHORT.pattern}|of|a|per|h|s|m|g|L")
_OTHER_NUMBER = re.compile(
    r"or|and|plus|minus|times|over|divided|not|than|more|less|hal(?:f|ves)|(?:third|quarter|fourth|fifth|sixth|eighth|tenth)s?"
    r"|(?:hundred|thousand|million|billion|trillion)(?:th)?s?|(?:dozen|score|pair|couple)s?|squared|cubed|factorial"
    r"|sqrt|sin|cos|tan|log|exp|mod|choose",
    re.IGNORECASE,
)
_MAX_WORDS = 4


def read_suffix(rest: str) -> Suffix | None:
    """Returns the kind of the text after a number; None if the text may change the number: "or 73", "million", "x^2".

    The kind of unit is ignored, as in the graders of MATH.
    """
    opened = TEXT.sub(r" \1 ", rest)
    bare = opened.strip()
    if not bare:
        return "nothing"
    if _PERCENT.fullmatch(bare):
        return "percent"
    if _DEGREES.fullmatch(bare) or bare in "€£¥₹":
        return "unit"
    if opened[0] != " ":  # 72x is algebra; 72 boxes is not
        return None
    words = [word for word in _BETWEEN.split(_POWER.sub("", bare)) if word]
    if not words or len(words) > _MAX_WORDS or any(map(_OTHER_NUMBER.fullmatch, words)):
        return None
    first_short = _SHORT_LATER if opened != rest else _SHORT  # 72 m is algebra, 72\text{ m} is not
    known = [_is_unit(words[0], first_short), *(_is_unit(word, _SHORT_LATER) for word in words[1:])]
    return "unit" if all(known) else None


def _is_unit(word: str, short: re.Pattern[str]) -> bool:
    return short.fullmatch(word) is not None or (len(word) > 2 and word.isascii() and word.isalpha())
