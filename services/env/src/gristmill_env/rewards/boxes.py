"""Boxed expressions in a text: `\\boxed{\\frac{1}{2}}` and `\\fbox{...}`, their braces matched."""

from __future__ import annotations

import re

_PIECES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def boxes(text: str) -> list[tuple[int, int]]:
    """Where the insides of all boxes that close start and end, in the order in which they start.

    One pass: escaped braces (`\\{`) are letters, and a box that never closes is passed over.
    """
    found: list[tuple[int, int]] = []
    opened: list[tuple[bool, int]] = []  # is it a box's, and where its inside starts
    for piece in _PIECES.finditer(text):
        if piece["box"] or piece["open"]:
            opened.append((bool(piece["box"]), piece.end()))
        elif piece["close"] and opened:
            boxed, inside = opened.pop()
            if boxed:
                found.append((inside, piece.start()))
    return sorted(found)


def last_boxed(text: str) -> str | None:
    """Inside of the last box that closes, the innermost of nested ones; None when there is none, or it is empty."""
    found = boxes(text)
    if not found:
        return None
    start, end = found[-1]
    return text[start:end].strip() or None


def count_boxes(text: str) -> int:
    """How many boxes `text` opens."""
    return sum(1 for _ in _BOX.finditer(text))
