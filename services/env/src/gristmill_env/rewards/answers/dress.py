"""Takes off what an answer wears and does not mean: `**$\\dfrac{9}{7}$.**` is `\\frac{9}{7}`."""

from __future__ import annotations

import re

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
"""A piece of text in LaTeX; the group is the text."""

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
    """`text` without mathematics delimiters, `$`, emphasis, sizes, and a trailing full stop, comma or colon.

    Thousands separators of any kind become commas, signs of Unicode the LaTeX that means the same,
    runs of blanks one. An exclamation mark stays: it may be a factorial.
    """
    bare = _EMPHASIS.sub(r"\1", text.strip()).strip("*`_ \t\n")
    bare = _DELIMITERS.sub("", bare)
    bare = _THOUSANDS.sub(",", bare).replace("{,}", ",")
    bare = _BLANKS.sub(" ", bare).strip().translate(_MEANT)
    if bare.startswith("\u2013"):  # an en dash before an answer is its minus; between two numbers it is a range
        bare = "-" + bare[1:]
    bare = _FRACTION.sub(r"\\frac", _SIZES.sub("", bare))
    bare = _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(_with_braces, bare))
    return bare.strip().rstrip(".;,:").strip("*`_ ")


def words_of(text: str) -> str | None:
    """The words of an answer that is all `\\text{...}`: "friday" of `\\text{Friday}`, "c" of `\\text{(C)}`."""
    match = TEXT.fullmatch(text)
    return plain_words(match[1]) if match and not any(char.isdigit() for char in match[1]) else None


def plain_words(text: str) -> str:
    """`text` as words to compare: no `\\text{}` and no brackets around, single blanks, no case."""
    words = " ".join(TEXT.sub(r" \1 ", text).split()).strip(" .,;:!")
    if words.startswith("(") and words.endswith(")"):
        words = words[1:-1].strip()
    return words.casefold()


def _with_braces(match: re.Match[str]) -> str:
    over, under = (part if part.startswith("{") else "{" + part + "}" for part in match.group("over", "under"))
    return rf"\frac{over}{under}"
