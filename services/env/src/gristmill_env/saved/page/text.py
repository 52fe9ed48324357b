"""Text and numbers, safe to stand in a page."""

from __future__ import annotations

import html
import re

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Control characters, and those that turn the reading direction round."""


def escaped(text: str) -> str:
    """`text` as it may stand between tags and in quoted attributes; what cannot be seen is shown as its code point."""
    return html.escape(_UNSEEN.sub(lambda found: f"[U+{ord(found[0]):04X}]", text), quote=True)


def number(value: float | None) -> str:
    """Three significant digits; "none" for None."""
    return "none" if value is None else f"{value:.3g}"


def share(part: int, whole: int) -> str:
    """ "12 %", or "none" of nothing."""
    return f"{100 * part / whole:.3g} %" if whole else "none"
