"""Splits tuples, intervals, sets and lists into their elements."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(r"\\[{}]|\\[A-Za-z]+|[()\[\]{},]")
_OPENING = {"(": 1, "[": 1, "{": 1, r"\{": 1, r"\langle": 1}
_CLOSING = {")": 1, "]": 1, "}": 1, r"\}": 1, r"\rangle": 1}
_ROUND_OR_SQUARE = ("(", "[", ")", "]")
_THOUSANDS = re.compile(r"[0-9],[0-9]{3}(?![0-9])")


@dataclass(frozen=True)
class Elements:
    """The elements in a pair of brackets."""

    brackets: str
    """Both brackets, such as "[)" for a half-open interval; empty for a list without brackets."""
    items: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        """Whether the elements form a tuple or an interval, not a set or a list."""
        return bool(self.brackets) and self.brackets[0] in _ROUND_OR_SQUARE


def split_elements(latex: str) -> Elements | None:
    """Returns the elements of `latex`, at least two; None if `latex` is not a tuple, an interval, a set or a list.

    If commas in a list may also separate thousands, only a comma before a blank separates elements: "1,234, 5,678" are
    two numbers.
    """
    tokens = list(_TOKEN.finditer(latex))
    if not any(token[0] == "," for token in tokens):
        return None
    first, last = tokens[0], tokens[-1]
    enclosed = first.start() == 0 and last.end() == len(latex) and first[0] in _OPENING and last[0] in _CLOSING
    depth, cuts = 0, []
    for token in tokens:
        depth += _OPENING.get(token[0], 0) - _CLOSING.get(token[0], 0)
        if depth < 0:
            return None
        if depth == 0 and token is not last:
            enclosed = False  # the first bracket closes before the end: "(1,2) ∪ (3,4)"
    if depth:
        return None
    for token in tokens:
        depth += _OPENING.get(token[0], 0) - _CLOSING.get(token[0], 0)
        if token[0] == "," and depth == int(enclosed):
            cuts.append(token.start())
    brackets = first[0] + last[0] if enclosed else ""
    if brackets[:1] not in _ROUND_OR_SQUARE and _THOUSANDS.search(latex):
        cuts = [cut for cut in cuts if latex[cut + 1 : cut + 2] == " "]
    if not cuts:
        return None
    start, end = (first.end(), last.start()) if enclosed else (0, len(latex))
    edges = [start, *(cut + 1 for cut in cuts)], [*cuts, end]
    elements = Elements(brackets, tuple(latex[a:b].strip() for a, b in zip(*edges, strict=True)))
    return elements if all(elements.items) else None
