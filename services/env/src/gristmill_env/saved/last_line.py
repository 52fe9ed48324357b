"""Whether the last line of a JSONL file, which lacks its newline, is all there."""

from __future__ import annotations

import msgspec


def is_whole(line: bytes) -> bool:
    """False for a line that a kill has torn: no beginning of a JSON object is JSON itself.

    Files that were made by hand or put together from others often end without a newline.
    """
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
