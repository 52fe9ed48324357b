"""Normalizes the LaTeX of an answer, and distinguishes mathematics from prose."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import pairwise

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
"""Text in LaTeX; the group is the text."""

_EMPHASIS = re.compile(r"(?<![\w)*])\*\*(?=\S)([^*]+)(?<=\S)\*\*(?![\w(*])")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]|\\?\$")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\!|\\[,;: ]|[~\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
_NEW_ROW = re.compile(
    r"\\\\\*?(?:\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm|in|mu|\\[a-z]+)\s*\])?|\\(?:cr|tabularnewline|newline)(?![A-Za-z])"
)
_BLANKS = re.compile(r"(\\\\)|\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\s+")
_SIZES = re.compile(
    r"\\(?:left|right) ?\.|\\(?:left|right|[bB]igg?[lr]?)(?=\s*[()\[\]|.\\])|\\displaystyle(?![A-Za-z])"
)
_FRACTION = re.compile(r"\\[dtc](frac|binom)(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\(?P<command>frac|binom)\s*(?P<over>[0-9]|\{[^{}]*\})\s*(?P<under>[0-9]|\{[^{}]*\})")
_SHORT_ROOT = re.compile(r"\\sqrt ?([0-9])")
_SHORT_LOGARITHM = re.compile(r"\\log ?_ ?([0-9])")
_COLON = re.compile(r"\{:\}|\\colon(?![A-Za-z]) ?")
_STARRED = re.compile(r"\\(?P<edge>begin|end) ?\{(?P<name>[A-Za-z]*matrix)\*\} ?(?:\[[a-z]\])?")
_PLAIN_TEX_MATRIX = re.compile(r"\\(?P<name>[pbvBV]?matrix|cases) ?\{")
_EMPTY = re.compile(r"\\varnothing(?![A-Za-z])|\\\{ ?\\\}")
_MEANT = str.maketrans({
    "\u2212": "-", "\ufe63": "-", "\uff0d": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ",
    "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ",
    "°": r"^\circ ", "％": "%", "∈": r"\in ", "∅": r"\emptyset ", "…": r"\ldots ",
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "θ": r"\theta ", "λ": r"\lambda ", "φ": r"\phi ", "ω": r"\omega ",
})  # fmt: skip


_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+|[₀₁₂₃₄₅₆₇₈₉]+|[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒]")
_DOTS = re.compile(r"\\(?:[cl]?dots|dots[bcimo])(?![A-Za-z])")
_MORE_DIGITS = re.compile(r"(?<=[0-9])(\.[0-9]+) ?\\ldots *$")
_VARIANTS = ("<wide>", "<narrow>", "<font>")
_NOT_ASCII = re.compile(r"[\x00-\x7f]?[^\x00-\x7f]{1,500}")
"""Bounded, because the time to compose a run of combining marks is quadratic."""
_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u02bc": "'", "\u201c": '"', "\u201d": '"', "\u2032": "'",
    "\u2010": "-", "\u2011": "-",
    **dict.fromkeys("\u00ad\u200b\u200e\u200f\u2060\ufeff"),
})  # fmt: skip


def plain_characters(text: str) -> str:
    """Returns `text` composed (NFC), with full-width and styled characters as plain ones and straight quotation marks.

    Hyphens become "-", and characters that have no width and no meaning disappear.
    Does not change superscripts, fractions or ligatures, as NFKC does: 7² is not 72.
    """
    if text.isascii():
        return text
    composed = _NOT_ASCII.sub(lambda run: unicodedata.normalize("NFC", run[0]), text).translate(_QUOTES)
    return "".join(char if char.isascii() else _plain_character(char) for char in composed)


@lru_cache(maxsize=4096)
def _plain_character(char: str) -> str:
    return unicodedata.normalize("NFKC", char) if unicodedata.decomposition(char).startswith(_VARIANTS) else char


def normalize_latex(text: str) -> str:
    """Removes mathematics delimiters, `$`, emphasis, sizes, and a trailing full stop, comma or colon from `text`.

    Thousands separators of any kind become commas. Unicode signs become the equivalent LaTeX, and runs of blanks become
    one blank. An exclamation mark remains, because it may be a factorial.
    """
    bare = _EMPHASIS.sub(r"\1", plain_characters(text.strip())).strip("*`_ \t\n")
    bare = _DELIMITERS.sub("", _NEW_ROW.sub(r"\\\\ ", bare))
    bare = _THOUSANDS.sub(",", bare).replace("{,}", ",")
    bare = _BLANKS.sub(lambda blank: blank[1] or " ", bare).strip()
    bare = _MORE_DIGITS.sub(r"\1", _DOTS.sub(r"\\ldots", _RAISED.sub(_as_latex, bare).translate(_MEANT)))
    if bare.startswith("\u2013"):  # an en dash before an answer is a minus sign; between two numbers it means a range
        bare = "-" + bare[1:]
    bare = _COLON.sub(":", _in_environments(_STARRED.sub(r"\\\g<edge>{\g<name>}", bare)))
    bare = _FRACTION.sub(r"\\\1", _SIZES.sub("", bare))
    bare = _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(_with_braces, bare))
    bare = _EMPTY.sub(r"\\emptyset", _SHORT_LOGARITHM.sub(r"\\log_{\1}", bare))
    return bare.strip().rstrip(".;,:。、").strip("*`_ ")


def _as_latex(match: re.Match[str]) -> str:
    """Returns superscripts as a power, subscripts as an index, and the sign of a fraction as `\\frac`."""
    plain = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
    if "\u2044" in plain:
        over, _, under = plain.partition("\u2044")
        return rf"\frac{{{over}}}{{{under}}}"
    return ("_" if unicodedata.decomposition(match[0][0]).startswith("<sub>") else "^") + "{" + plain + "}"


def _in_environments(text: str) -> str:
    """Returns `text` with `\\pmatrix{...}` of plain TeX as an environment."""
    match = _PLAIN_TEX_MATRIX.search(text)
    if match is None or len(text) > 2 * MAX_CHARS:
        return text
    depth = 1
    for at, char in enumerate(text[match.end() :], match.end()):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            body = text[match.end() : at].strip()
            name, rest = match["name"], _in_environments(text[at + 1 :])
            return rf"{text[: match.start()]}\begin{{{name}}}{body}\end{{{name}}}{rest}"
    return text


def words_of(text: str) -> str | None:
    """Returns the words of an answer that is all `\\text{...}`: "friday" for `\\text{Friday}`, "c" for
    `\\text{(C)}`; also of an answer of several quantities, such as a date and `2\\text{ h }30\\text{ min}`."""
    if has_several_parts(text):
        return plain_words(text)
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
    return rf"\{match['command']}{over}{under}"


MAX_CHARS = 1000
_MAX_DEPTH = 40

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_COMMAND = re.compile(r"\\(?:begin|end|operatorname) ?\{[A-Za-z*]+\}|\\[A-Za-z]+")
_OPENING, _CLOSING = frozenset("({["), frozenset(")}]")
TWO_NUMBERS = re.compile(r"(?<!frac )(?<!binom )(?<![0-9A-Za-z.])[0-9.]+ [0-9]")
"""Two numbers with a blank between them, which Math-Verify adds or multiplies."""
_EXPONENT = re.compile(r"(?<![A-Za-z])[0-9.]+[eE][+-]?[0-9]")
_POWERS = r"(?:hundred|thousand|(?:m|b|tr|quadr|quint)illion|lakh|crore)(?:th)?s?"
_SCALE = rf"{_POWERS}|(?:dozen|score|pair|couple|gross)s?|half|not"
_MULTIPLIERS = re.compile(rf"(?<![A-Za-z\\])(?:{_SCALE})(?![A-Za-z])", re.IGNORECASE)
OTHER_NUMBER = re.compile(
    rf"{_SCALE}|or|and|plus|minus|times|over|divided|than|more|less|halves"
    r"|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|[a-z]+teenth|[a-z]+tieth)s?"
    r"|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
    r"|squared|cubed|factorial|sqrt|sin|cos|tan|log|exp|mod|choose",
    re.IGNORECASE,
)
"""A word after a number that makes another number of it, or joins it with another one. It is no unit."""
_QUANTITIES = re.compile(
    r"[0-9] ?\\(?:text|textrm|mathrm|mbox)\s*\{(?! ?(?:(?:and|or|mod|in)(?![A-Za-z])|\())[^{}]*[A-Za-z][^{}]*\}"
    r"(?! ?\^).*[0-9]"
)
"""A number, its unit, and another number, which is not the unit's power."""
_DATE = re.compile(r"[0-9]{4}([-/])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([-/])[0-9]{1,2}\2[0-9]{4}|[0-9]+(?:\.[0-9]+){2,}")
BASED = re.compile(r"[0-9)] ?_|(?<![0-9.])0[xXbBoO][0-9A-Fa-f]|(?<![A-Za-z])base[ -]?[0-9]")
"""A number with a base, which Math-Verify omits."""
_DERIVATIVE = re.compile(
    r"\\frac ?\{ ?(?:d|\\partial(?![A-Za-z])) ?([A-Za-z]?) ?\} ?\{ ?(?:d|\\partial(?![A-Za-z])) ?([A-Za-z]) ?\}"
)
REPEATED = re.compile(r"\\(?:overline|bar|dot) ?\{? ?[0-9]")
"""Repeated digits, whose place Math-Verify loses."""
UNREAD = re.compile(rf"'|\\not(?![A-Za-z])|\\prime(?![A-Za-z])|!!|\\ldots|{_DERIVATIVE.pattern}")
"""Signs that Math-Verify omits or misreads: primes, `\\not`, double factorials, dots, and derivatives."""
_VARIABLE = "[BDEGIMO-SUX-Za-fi-ln-rt-z]"
"""A letter that is not the symbol of a unit."""
LETTER_FONT = re.compile(
    r"\\(?:mathbf|boldsymbol|bm) ?\{ ?([A-Za-z]) ?\}|"
    rf"\\(?:mathrm|text|textrm) ?\{{ ?({_VARIABLE}) ?\}}"
)
"""A letter of mathematics in bold or upright type, which Math-Verify takes for the unit of the number before it."""
TRANSPOSE = re.compile(
    r"\^ ?(?:T(?![A-Za-z])|\{ ?(?:T|\\top|\\(?:mathrm|text) ?\{ ?T ?\}) ?\}|\\top(?![A-Za-z])|\\mathrm ?\{ ?T ?\})"
)
"""A power that Math-Verify omits."""
_UNIT = re.compile(
    rf"(?:(?P<rest>.*[0-9A-Za-z)\]}}]) ?\\(?:text|textrm|mathrm|mbox) ?\{{(?! ?{_VARIABLE} ?\}}) ?[A-Za-z]"
    r"(?:[^{}]|\{[^{}]*\})*\}"
    r"|(?P<before>.*(?:[0-9)\]}]|\\pi)) ?(?<![A-Za-z])(?:cm|mm|km|kg|mg|ml|ft|in|lb|yd))"
    r"(?: ?\^ ?(?:\{ ?[23] ?\}|[23]))?"
)
"""An expression and its unit: `2\\sqrt{3}\\text{ cm}`."""
_SHORT_SET = re.compile(r"\\mathbb ([A-Z])(?![A-Za-z])")
_WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]+(?![A-Za-z])")
_SMALL_WORDS = re.compile(
    r"(?<![A-Za-z])(?:all|an|any|are|as|at|be|but|by|can|for|has|if|is|it|no|not|of|so|the|to|yes)(?![A-Za-z])",
    re.IGNORECASE,
)
_NAMES = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|sec|csc|cot|log|ln|exp|min|max|gcd|lcm|det"
    "|alpha|beta|gamma|delta|theta|lambda|omega|sigma|phi|pi|infty"
)
_FUNCTION = re.compile(rf"(?<![A-Za-z\\])({_NAMES})(?![A-Za-z])")
_KEPT_WORD = re.compile(rf"sqrt|and|or|infinity|mod|{_NAMES}")
_ROOT = re.compile(r"(?:√|(?<![A-Za-z\\])sqrt) ?(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|[A-Za-z]))")
_POWER = re.compile(r"\*\*|\^ ?\*")
_LONG_EXPONENT = re.compile(r"\^ ?(-?[0-9]{2,}|-[0-9])")


def mathematics(bare: str) -> str | None:
    """Returns `bare` (normalized by `normalize_latex`) as LaTeX, or None if it is not a single mathematical expression.

    Returns None in these cases:

    - prose ("Paris", "not 72"), which Math-Verify would read as a product of letters that equals its anagrams;
    - adjacent numbers ("1 000") and "1e999", which Math-Verify would multiply;
    - several quantities, and lists with dots, of which Math-Verify reads a part;
    - numbers with a base ("101_2 + 11_2"), of which Math-Verify omits the base;
    - braces that do not match;
    - a box, whose inside is the answer;
    - text that is too long or too deeply nested to be an answer.
    """
    if not bare or len(bare) > MAX_CHARS or not _nests_well(bare):
        return None
    bare = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", bare)
    if not bare.isascii() or not any(char.isalnum() for char in bare):
        return None
    if any(pattern.search(bare) for pattern in (TWO_NUMBERS, _EXPONENT, BASED, _BOX, _DOTS)) or _is_prose(bare):
        return None
    if unit := _UNIT.fullmatch(bare):
        said = "" if unit["rest"] is None else bare[unit.end("rest") :]
        if _SMALL_WORDS.search(said) or any(map(OTHER_NUMBER.fullmatch, _WORD.findall(said))):
            return None  # a statement, such as "n is even", or another number, such as "3 squared"
        bare = unit["rest"] or unit["before"]
    bare = _SHORT_SET.sub(r"\\mathbb{\1}", LETTER_FONT.sub(lambda letter: letter[1] or letter[2], bare))
    latex = _LONG_EXPONENT.sub(r"^{\1}", _POWER.sub("^", _DERIVATIVE.sub(r"D_{\1d\2}", TRANSPOSE.sub("^{t}", bare))))
    return _FUNCTION.sub(r"\\\1 ", latex).replace("infinity", r"\infty ")


def _nests_well(text: str) -> bool:
    """Whether curly brackets match, and no bracket nests too deeply for an answer."""
    depth = curly = 0
    for char in text:
        depth += (char in _OPENING) - (char in _CLOSING)
        curly += (char == "{") - (char == "}")
        if curly < 0 or depth > _MAX_DEPTH:
            return False
    return curly == 0


def multiplies(said: str) -> bool:
    """Whether words change the number before them, as in "5 million". Math-Verify omits them."""
    return _MULTIPLIERS.search(said) is not None


def changes(said: str) -> bool:
    """Whether words make another number of the number before them. "and" and "or" alone join two answers."""
    return any(word not in ("and", "or") and OTHER_NUMBER.fullmatch(word) for word in _WORD.findall(said))


def has_several_parts(bare: str) -> bool:
    """Whether the answer is several quantities (`5\\text{ ft }6\\text{ in}`), a date, or an outline number.

    Math-Verify omits everything after the first quantity, and subtracts the parts of a date.
    """
    return _QUANTITIES.search(bare) is not None or _DATE.fullmatch(bare) is not None


def _is_prose(bare: str) -> bool:
    if multiplies(TEXT.sub(r" \1 ", bare)) or has_several_parts(bare):
        return True
    plain = _COMMAND.sub(" ", TEXT.sub(" ", bare.replace("_", " ")))
    if _SMALL_WORDS.search(plain):
        return True
    only_letters = not re.search(r"[^A-Za-z ]", bare)
    longest = 2 if only_letters else 3  # maximum length of a word that counts as a product of variables
    words = [word for word in _WORD.findall(plain) if not _KEPT_WORD.fullmatch(word)]
    return any(len(word) > longest and not _run(word) for word in words)


def _run(word: str) -> bool:
    """Whether the letters are consecutive, like names of variables and corners: "abc", "XYZ", "ABCD"."""
    return all(ord(b) - ord(a) == 1 for a, b in pairwise(word))
