"""Boxed expressions in a text, with matched braces: `\\boxed{\\frac{1}{2}}` and `\\fbox{...}`."""

from __future__ import annotations

import re

_PIECES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_DECORATION = re.compile(
    r"\$|\\[()\[\],;:! ]|\\q?quad(?![A-Za-z])|[*~]|(?<![A-Za-z])[A-Za-z](?:_(?:\w|\{\w+\}))?\s*=\s*(?:\\[(\[]|\$|\s)*$"
)
_TEXT = re.compile(r"\\(?:text|mbox|textrm)\s*\{([^{}]*)\}")
_BETWEEN = re.compile(r"\s*(?:[,;&]|[,;]?\s*(?:and|or))\s*", re.IGNORECASE)
_MOST_BETWEEN = 80


def boxes(text: str) -> list[tuple[int, int]]:
    """Returns the start and end of the inside of each box that closes, in the order of their starts.

    Takes one pass. Escaped braces (`\\{`) count as letters, and a box that never closes is skipped.
    """
    return [(inside, end) for _, inside, end in _closed(text)]


def last_boxed(text: str) -> str | None:
    """Returns the answer in the last boxes; None when no box closes, or the last box is empty.

    Usually this is the inside of the last box that closes; of nested boxes, the innermost. If the last boxes are a list
    (`\\boxed{1} and \\boxed{2}`, `x = \\boxed{1}, x = \\boxed{2}`), the answer is their insides, joined by commas.
    """
    insides: list[str] = []
    follows = 0
    for command, start, end in reversed(_closed(text)):
        inside = text[start:end].strip()
        if not inside or (insides and (end >= follows or not _is_list(text[end + 1 : follows]))):
            break
        insides.insert(0, inside)
        follows = command
    return ", ".join(dict.fromkeys(insides)) or None


def _closed(text: str) -> list[tuple[int, int, int]]:
    """Returns for each box that closes the start of its command, and the start and end of its inside."""
    found: list[tuple[int, int, int]] = []
    opened: list[tuple[int | None, int]] = []  # start of a box's command, and start of the inside
    for piece in _PIECES.finditer(text):
        if piece["box"] or piece["open"]:
            opened.append((piece.start() if piece["box"] else None, piece.end()))
        elif piece["close"] and opened:
            command, inside = opened.pop()
            if command is not None:
                found.append((command, inside, piece.start()))
    return sorted(found)


def _is_list(between: str) -> bool:
    """Whether the text between two boxes only separates the items of a list.

    A separator is "and", "or" or a comma, possibly with delimiters of mathematics and `x =` around it. Any other word
    ("no, \\boxed{72}") and an empty line begin another statement.
    """
    if len(between) > _MOST_BETWEEN or "\n\n" in between:
        return False
    return _BETWEEN.fullmatch(_DECORATION.sub(" ", _TEXT.sub(r" \1 ", between))) is not None


def count_boxes(text: str) -> int:
    """Returns the number of boxes that `text` opens."""
    return sum(1 for _ in _BOX.finditer(text))
