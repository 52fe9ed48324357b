"""Reads the shape of a JSON matrix of numbers from its bytes: the lengths of its rows and the form of its numbers.

A group's arrays have 65,000 numbers each. To make Python objects of the numbers takes milliseconds, during which no
other request continues. A scan of the bytes takes a fraction of that time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.uint8]
_BLANK = b" \t\r\n"
_COMMA, _POINT = ord(","), ord(".")


@dataclass(frozen=True)
class Matrix:
    rows: list[int]
    """Entries per row."""
    whole: bool
    """No number has a point or an exponent: all are ints."""
    pointed: bool
    """Every number has a point, and none an exponent that could overflow: all are finite floats."""


def scan(text: bytes) -> Matrix | None:
    """Scans valid JSON. Returns None for anything but an array of arrays of numbers."""
    text = text.strip(_BLANK)
    # Strings have quotes; objects, true, false and null have a byte beyond "e", which ends the bytes of numbers.
    if text[:1] != b"[" or b'"' in text or np.frombuffer(text, np.uint8).max() > ord("e"):
        return None
    rows: list[int] = []
    some_points, some_exponents = b"." in text, b"e" in text or b"E" in text
    pointed = True
    end = 0
    while (start := text.find(b"[", end + 1)) > 0:
        # One row after the other, nothing but a comma between them, and no array in a row.
        if text[end + 1 : start].strip(_BLANK) not in (b"", b","):
            return None
        end = text.find(b"]", start)
        if text.find(b"[", start + 1, end) > 0:
            return None
        # Row by row, so that the arrays of numpy stay in the processor's cache.
        row = np.frombuffer(text, np.uint8, end - start - 1, start + 1)
        rows.append(_count(row, _COMMA) + 1 if not _blank(text, start + 1, end) else 0)
        pointed = pointed and (_count(row, _POINT) if some_points else 0) == rows[-1]
        pointed = pointed and not (some_exponents and _may_overflow(row))
    return (
        Matrix(rows, not some_points and not some_exponents, pointed) if not text[end + 1 : -1].strip(_BLANK) else None
    )


def _count(row: Row, sign: int) -> int:
    return int(np.count_nonzero(row == sign))


def _may_overflow(row: Row) -> bool:
    """Returns whether an exponent in the row is not negative."""
    exponents = np.flatnonzero((row == ord("e")) | (row == ord("E")))
    return bool((row[exponents + 1] != ord("-")).any())


def _blank(text: bytes, start: int, end: int) -> bool:
    return not text[start : min(end, start + 64)].strip(_BLANK) and not text[start:end].strip(_BLANK)
