"""Makes text and numbers safe for an HTML page."""

from __future__ import annotations

import html
import re

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Control characters, and characters that reverse the reading direction."""


def escaped(text: str) -> str:
    """Returns `text` escaped for HTML content and quoted attributes; invisible characters become their code points."""
    return html.escape(_UNSEEN.sub(lambda found: f"[U+{ord(found[0]):04X}]", text), quote=True)


def number(value: float | None) -> str:
    """Returns three significant digits; "none" for None."""
    return "none" if value is None else f"{value:.3g}"


def share(part: int, whole: int) -> str:
    """Returns a percentage such as "12 %"; "none" if `whole` is 0."""
    return f"{100 * part / whole:.3g} %" if whole else "none"
