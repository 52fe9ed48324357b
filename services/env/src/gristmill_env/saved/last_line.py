"""Checks whether the last line of a JSONL file, without a newline, is complete."""

from __future__ import annotations

import msgspec


def is_whole(line: bytes) -> bool:
    """Returns False for a torn line after a kill, because no prefix of a JSON object is valid JSON.

    Files that were written by hand or concatenated often end without a newline.
    """
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
