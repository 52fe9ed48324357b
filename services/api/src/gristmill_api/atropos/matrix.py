"""What a JSON matrix of numbers holds, told from its bytes: the lengths of its rows and how its numbers are written.

A group's arrays have 65,000 numbers each. To make Python objects of them takes milliseconds in which no other request
goes on; to look at their bytes takes a fraction of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_BLANK = b" \t\r\n"


@dataclass(frozen=True)
class Matrix:
    rows: list[int]
    """Entries a row."""
    whole: bool
    """No number has a point or an exponent: all are ints."""
    pointed: bool
    """Every number has a point, and none an exponent that could overflow: all are finite floats."""


def scan(text: bytes) -> Matrix | None:
    """Look at valid JSON. None when it is anything but an array of arrays of numbers."""
    text = text.strip(_BLANK)
    # Strings have quotes; objects, true, false and null have a byte beyond "e", which ends the bytes of numbers.
    if text[:1] != b"[" or b'"' in text or np.frombuffer(text, np.uint8).max() > ord("e"):
        return None
    rows: list[int] = []
    whole = pointed = True
    end = 0
    while (start := text.find(b"[", end + 1)) > 0:
        # One row after the other, nothing but a comma between them, and no array in a row.
        if text[end + 1 : start].strip(_BLANK) not in (b"", b","):
            return None
        end = text.find(b"]", start)
        if text.find(b"[", start + 1, end) > 0:
            return None
        # Row by row: what numpy makes of one stays in the processor's cache.
        row = np.frombuffer(text, np.uint8, end - start - 1, start + 1)
        points = _count(row, ".")
        exponents = np.concatenate([np.flatnonzero(row == ord(sign)) for sign in "eE"])
        rows.append(_count(row, ",") + 1 if not _blank(text, start + 1, end) else 0)
        whole = whole and not points and not len(exponents)
        pointed = pointed and points == rows[-1] and bool((row[exponents + 1] == ord("-")).all())
    return Matrix(rows, whole, pointed) if not text[end + 1 : -1].strip(_BLANK) else None


def _count(row: npt.NDArray[np.uint8], sign: str) -> int:
    return int(np.count_nonzero(row == ord(sign)))


def _blank(text: bytes, start: int, end: int) -> bool:
    return not text[start : min(end, start + 64)].strip(_BLANK) and not text[start:end].strip(_BLANK)
