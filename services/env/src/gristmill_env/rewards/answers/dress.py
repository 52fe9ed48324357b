"""Normalizes the LaTeX of an answer: `**$\\dfrac{9}{7}$.**` becomes `\\frac{9}{7}`."""

from __future__ import annotations

import re

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
"""Text in LaTeX; the group is the text."""

_EMPHASIS = re.compile(r"(?<![\w)*])\*\*(?=\S)([^*]+)(?<=\S)\*\*(?![\w(*])")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]|\\?\$")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\!|,?\\[,;: ]|[~\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
_BLANKS = re.compile(r"\\[,;:! ]|~|\\q?quad\b|\s+")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?=\s*[()\[\]|.\\])|\\displaystyle(?![A-Za-z])")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?P<over>[0-9]|\{[^{}]*\})\s*(?P<under>[0-9]|\{[^{}]*\})")
_SHORT_ROOT = re.compile(r"\\sqrt ?([0-9])")
_MEANT = str.maketrans({
    "\u2212": "-", "\ufe63": "-", "\uff0d": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ",
    "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ",
    "°": r"^\circ ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "％": "%", "∈": r"\in ", "∅": r"\emptyset ",
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "θ": r"\theta ", "λ": r"\lambda ", "φ": r"\phi ", "ω": r"\omega ",
})  # fmt: skip


def undressed(text: str) -> str:
    """Removes mathematics delimiters, `$`, emphasis, sizes, and a trailing full stop, comma or colon from `text`.

    Thousands separators of any kind become commas. Unicode signs become the equivalent LaTeX, and runs of blanks become
    one blank. An exclamation mark remains, because it may be a factorial.
    """
    bare = _EMPHASIS.sub(r"\1", text.strip()).strip("*`_ \t\n")
    bare = _DELIMITERS.sub("", bare)
    bare = _THOUSANDS.sub(",", bare).replace("{,}", ",")
    bare = _BLANKS.sub(" ", bare).strip().translate(_MEANT)
    if bare.startswith("\u2013"):  # an en dash before an answer is a minus sign; between two numbers it means a range
        bare = "-" + bare[1:]
    bare = _FRACTION.sub(r"\\frac", _SIZES.sub("", bare))
    bare = _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(_with_braces, bare))
    return bare.strip().rstrip(".;,:").strip("*`_ ")


def words_of(text: str) -> str | None:
    """Returns the words of an answer that is all `\\text{...}`: "friday" for `\\text{Friday}`, "c" for
    `\\text{(C)}`."""
    match = TEXT.fullmatch(text)
    return plain_words(match[1]) if match and not any(char.isdigit() for char in match[1]) else None


def plain_words(text: str) -> str:
    """Returns `text` as comparable words: without `\\text{}` and outer brackets, with single blanks, casefolded."""
    words = " ".join(TEXT.sub(r" \1 ", text).split()).strip(" .,;:!")
    if words.startswith("(") and words.endswith(")"):
        words = words[1:-1].strip()
    return words.casefold()


def _with_braces(match: re.Match[str]) -> str:
    over, under = (part if part.startswith("{") else "{" + part + "}" for part in match.group("over", "under"))
    return rf"\frac{over}{under}"
