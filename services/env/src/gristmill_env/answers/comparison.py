"""Compares two answers without algebra if possible. Otherwise returns the pairs that algebra must decide."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from gristmill_env.answers.grids import Grid, has_system, read_grid
from gristmill_env.answers.latex import (
    BASED,
    LETTER_FONT,
    MAX_CHARS,
    REPEATED,
    TEXT,
    TRANSPOSE,
    UNREAD,
    changes,
    has_several_parts,
    mathematics,
    multiplies,
    normalize_latex,
    plain_words,
    words_of,
)
from gristmill_env.answers.numbers import Number, Radical, equal, normalized_number, radical_of, read_radical
from gristmill_env.answers.numerals import Numeral, read_numeral

_NAMED = re.compile(r"([A-Za-z]) ?(?:=|\\in(?![A-Za-z])) ?([^=<>]+)")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|in|leq|geq|neq|lt|gt|subset|equiv|approx|sim)(?![A-Za-z])")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LETTER = re.compile(r"[A-Za-z]")
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|ne|leq|geq|neq|lt|gt)(?![A-Za-z])")
_CONNECTIVE = re.compile(r"(?<![A-Za-z\\])(and|or)(?![A-Za-z])|\\(land|wedge|lor|vee)(?![A-Za-z])")
_MODULO = re.compile(
    r"(?P<rest>.+?)[ ({]*(?:\\[pb]?mod|(?<![A-Za-z\\])mod)(?![A-Za-z])[ ({]*(?P<modulus>[^(){}]+?)[)} ]*"
)
_HALF_DAY = re.compile(r"(?P<rest>.*[0-9]) ?(?P<half>[ap])\.? ?m\.?", re.IGNORECASE)
_EQUIVALENT = re.compile(r"\\equiv(?![A-Za-z])")
_RATIO = re.compile(r"(?:[A-Za-z]+(?: ?: ?[A-Za-z]+)* ?= ?)?(?P<terms>[^:=<>]+(?::[^:=<>]+){2,})")
_OF_POINTS = re.compile(
    r"\\(?:m?angle|measuredangle|sphericalangle|triangle|square|odot|overline|overrightarrow|overleftrightarrow|widehat"
    r"|vec|arc)(?![A-Za-z])|[{},]|(?<![A-Za-z])and(?![A-Za-z])"
)
_POINTS = re.compile(r"[A-Z]+(?: [A-Z]+)*")
_LETTER_UNIT = re.compile(r"[0-9] [A-Za-z](?![A-Za-z])")
"""A letter that may be a unit or a variable: `2 h` equals `2` and `2h`."""
_LOOSE_BLANK = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")


@dataclass(frozen=True)
class Answer:
    """One extracted or reference answer, parsed once."""

    bare: str
    """The answer's text after normalization by `normalize_latex`."""
    number: Number | None
    """Set if the answer is one number and nothing else."""
    numeral: Numeral | None
    """Set if the answer is a number whose base is written. A numeral in base ten is a number."""
    grid: Grid | None
    """Set if the answer is a matrix, a determinant or a system of rows."""
    words: str | None
    """The words, if the whole answer is `\\text{...}`. They are compared as words."""
    latex: str | None
    """The LaTeX for the symbolic checker; None if the answer is prose."""

    @property
    def readable(self) -> bool:
        """Whether the answer can be compared with other answers."""
        return any(part is not None for part in (self.number, self.numeral, self.grid, self.words, self.latex))

    @property
    def is_relation(self) -> bool:
        """Whether the answer is an equation, an inequality, or a membership."""
        return _RELATION.search(self.bare) is not None

    @property
    def read_in_part(self) -> bool:
        """Whether Math-Verify's parser omits a part: a base, a prime, a transpose, the rows of a system, …"""
        system = has_system(self.bare) or (self.grid is not None and self.grid.kind == "system")
        based = self.numeral is not None or any(
            pattern.search(self.bare) for pattern in (BASED, UNREAD, LETTER_FONT, TRANSPOSE, REPEATED)
        )
        return system or based or has_several_parts(self.bare) or any(map(changes, TEXT.findall(self.bare)))

    @property
    def misread(self) -> bool:
        """Whether Math-Verify's parser loses the order of this reference answer, or a word or sign that changes it."""
        parts = (self.qualified, self.connective, self.ratio, self.points)
        signs = any(sign in self.bare for sign in (r"\begin", r"\langle", ":")) or _RELATION.match(self.bare)
        return bool(signs) or multiplies(self.said) or any(part is not None for part in parts)

    @cached_property
    def said(self) -> str:
        """The text of `bare` with the words of `\\text{}` in their places; empty for a very long text."""
        if len(self.bare) > MAX_CHARS:
            return ""
        return " ".join(TEXT.sub(r" \1 ", self.bare).split())

    @cached_property
    def qualified(self) -> tuple[Answer, str] | None:
        """The answer without its last words and these words, if they are a modulus ("mod 5"), "am" or "pm"; else None.

        Algebra omits them.
        """
        if match := _MODULO.fullmatch(self.said):
            rest, words = _EQUIVALENT.sub("=", match["rest"]), f"mod {read_answer(match['modulus']).tight}"
        elif match := _HALF_DAY.fullmatch(self.said):
            rest, words = match["rest"], match["half"].lower() + "m"
        else:
            return None
        return read_answer(rest), words

    @cached_property
    def connective(self) -> str | None:
        """The word "and" or "or" that joins inequalities; None without either word, or with both."""
        if not _INEQUALITY.search(self.bare):
            return None
        words = {
            word or ("and" if sign in ("land", "wedge") else "or") for word, sign in _CONNECTIVE.findall(self.said)
        }
        return words.pop() if len(words) == 1 else None

    @cached_property
    def ratio(self) -> tuple[Answer, ...] | None:
        """The terms of a ratio of three or more, such as `1:2:3`, which algebra takes for quotients; else None."""
        match = _RATIO.fullmatch(self.said) if ":" in self.bare else None
        return None if match is None else tuple(map(read_answer, match["terms"].split(":")))

    @cached_property
    def points(self) -> tuple[str, ...] | None:
        """The names of figures by their points, sorted: "ABC" of `\\angle ABC`. None for other answers.

        Algebra takes the letters for factors, whose order does not count.
        """
        names = " ".join(_OF_POINTS.sub(" ", self.said).split())
        if len(names) < 2 or not _POINTS.fullmatch(names):
            return None
        ordered = sorted(names.split())
        return tuple(ordered) if max(map(len, ordered)) > 1 else None

    @cached_property
    def radical(self) -> Radical | None:
        """The answer as a product of fractions, square roots and π; None if it does not have this form."""
        if self.number is not None:
            return radical_of(self.number)
        return None if self.latex is None else read_radical(self.latex)

    @cached_property
    def tight(self) -> str:
        """The text of `bare` without insignificant blanks."""
        return _LOOSE_BLANK.sub("", self.bare)

    @cached_property
    def named(self) -> tuple[str, Answer] | None:
        """The letter and the value, if the answer has the form `x = 5`; else None."""
        match = _NAMED.fullmatch(self.bare)
        if match is None or re.search(rf"(?<![A-Za-z\\]){match[1]}(?![A-Za-z])", match[2]):
            return None
        value = read_answer(match[2])
        return None if value.is_relation else (match[1], value)

    @cached_property
    def elements(self) -> Elements | None:
        """The elements, if the answer is a tuple, an interval, a set or a list; else None."""
        return None if self.latex is None or self.is_relation else split_elements(self.latex)


def read_answer(text: str) -> Answer:
    """Parses an extracted answer. Results are cached, because a group has few different answers."""
    if len(text) > 2 * MAX_CHARS:
        return Answer(bare="", number=None, numeral=None, grid=None, words=None, latex=None)
    return _read(text)


@lru_cache(maxsize=4096)
def _read(text: str) -> Answer:
    bare = normalize_latex(text)
    number = normalized_number(bare)
    numeral, grid = (read_numeral(bare), read_grid(bare)) if number is None and len(bare) <= MAX_CHARS else (None, None)
    if numeral is not None and numeral.base == 10:
        number, numeral = Number(numeral.value, percent=False, decimal=True), None
    latex = mathematics(bare) if number is None or _LETTER_UNIT.search(bare) else number.latex
    if numeral is not None or has_system(bare) or (grid is not None and grid.kind == "system"):
        latex = None  # Math-Verify omits the base, and most rows of a system
    return Answer(bare, number, numeral, grid, words_of(bare) if number is None else None, latex)


@dataclass(frozen=True)
class Pair:
    """A reference answer and an extracted answer, as LaTeX. Only algebra can decide whether they are equal."""

    gold: str
    extracted: str


Decision = bool | tuple[Pair, ...]
"""True if equal, False if not; or pairs, if the answers are equal exactly when every pair is equal."""


def compare(gold: Answer, extracted: Answer, tolerance: float = 0.0) -> Decision:
    """Decides whether `extracted` equals the answer `gold`, which must be readable.

    Numbers (see `number.equal`) and products of roots and π are compared exactly. `\\text{}` is compared as words,
    tuples, intervals and matrices element by element, numerals by base and digits. Answers with the same text are
    equal. Algebra decides all other cases.
    """
    if gold.number is not None and extracted.number is not None:
        return equal(gold.number, extracted.number, tolerance)
    if gold.words is not None:
        return plain_words(extracted.bare) == gold.words
    if gold.number is None and gold.tight == extracted.tight:  # a number is not the list "1, 234"
        return True
    if gold.numeral is not None or extracted.numeral is not None:
        return gold.numeral == extracted.numeral
    if gold.grid is not None and extracted.grid is not None:
        return _compare_grids(gold.grid, extracted.grid, tolerance)
    if gold.qualified and extracted.qualified:
        (one, words), (other, others) = gold.qualified, extracted.qualified
        return words == others and one.readable and compare(one, other, tolerance)
    if gold.ratio or extracted.ratio:
        if not gold.ratio or not extracted.ratio or len(gold.ratio) != len(extracted.ratio):
            return False
        return _compare_in_order(gold.ratio, extracted.ratio, tolerance)
    if gold.latex is None or extracted.latex is None or not may_agree(gold, extracted):
        return False
    if gold.radical is not None and extracted.radical is not None and not tolerance:
        return gold.radical == extracted.radical
    whole = (Pair(gold.latex, extracted.latex),)
    if unwrapped := _values(gold, extracted):
        return compare(*unwrapped, tolerance)
    if gold.elements is not None and extracted.elements is not None:
        return _compare_elements(gold.elements, extracted.elements, whole, tolerance)
    return whole


def _values(gold: Answer, extracted: Answer) -> tuple[Answer, Answer] | None:
    """Returns both values without `x =`, if both answers name the same letter or only one names a letter."""
    if gold.named and extracted.named:
        return (gold.named[1], extracted.named[1]) if gold.named[0] == extracted.named[0] else None
    if gold.named and not extracted.is_relation:
        return gold.named[1], extracted
    if extracted.named and not gold.is_relation:
        return gold, extracted.named[1]
    return None


def may_agree(gold: Answer, extracted: Answer) -> bool:
    """Whether the answers have the same form as far as Math-Verify's parser drops the form.

    The parser drops bases, primes, and the rows of systems, reads `X` as `x`, and takes a tuple for the set of its
    elements. It also drops the words between inequalities, and multiplies the points of figures.
    """
    if gold.connective and extracted.connective and gold.connective != extracted.connective:
        return False
    if gold.points and extracted.points and gold.points != extracted.points:
        return False
    if gold.numeral != extracted.numeral:
        return False
    if any(side.grid is not None and side.grid.kind == "system" for side in (gold, extracted)):
        return False
    if UNREAD.findall(gold.tight) != UNREAD.findall(extracted.tight):
        return False
    if gold.number is not None and extracted.elements is not None:
        return False
    if gold.elements is not None and extracted.elements is not None:
        return not gold.elements.ordered or extracted.elements.ordered
    return not _same_but_for_case(gold.bare, extracted.bare)


def _same_but_for_case(one: str, other: str) -> bool:
    """Whether a letter is a capital in one of the answers only. The case of an answer that is one letter is free."""
    letters, others = (set(_LETTER.findall(_COMMAND.sub(" ", text))) for text in (one, other))
    if len(letters | others) <= 2 and max(len(one), len(other)) == 1:
        return False
    return any(letter.swapcase() in others for letter in letters - others)


def _compare_grids(gold: Grid, extracted: Grid, tolerance: float) -> Decision:
    if gold.kind != extracted.kind or gold.shape != extracted.shape:
        return False
    if gold.name and extracted.name and gold.name != extracted.name:
        return False
    golds, cells = ([read_answer(cell) for row in side.rows for cell in row] for side in (gold, extracted))
    return _compare_in_order(golds, cells, tolerance)


def _compare_in_order(golds: Sequence[Answer], found: Sequence[Answer], tolerance: float) -> Decision:
    undecided: list[Pair] = []
    for one, other in zip(golds, found, strict=True):
        if one.is_relation == other.is_relation and (one.tight == other.tight or one.readable):
            decision = one.tight == other.tight or compare(one, other, tolerance)
        else:
            decision = False
        if decision is False:
            return False
        if decision is not True:
            undecided.extend(decision)
    return tuple(undecided) or True


def _compare_elements(gold: Elements, extracted: Elements, whole: tuple[Pair, ...], tolerance: float) -> Decision:
    if {gold.brackets, extracted.brackets} == {"()", _ANGLES}:  # two notations of a vector
        pass
    elif gold.brackets != extracted.brackets:
        return whole
    golds, items = ([read_answer(item) for item in side.items] for side in (gold, extracted))
    if not all(answer.readable for answer in golds):
        return whole
    if not gold.ordered:
        return _same_set(golds, items, whole, tolerance)
    if len(golds) != len(items):
        return False
    return _compare_in_order(golds, items, tolerance)


def _same_set(golds: list[Answer], found: list[Answer], whole: tuple[Pair, ...], tolerance: float) -> Decision:
    """Compares two sets of numbers without regard to order and repetition."""
    if not all(answer.number is not None for answer in (*golds, *found)):
        return whole
    return all(any(compare(one, other, tolerance) for other in found) for one in golds) and all(
        any(compare(one, other, tolerance) for one in golds) for other in found
    )


def canonical_answer(text: str) -> str:
    """Returns the canonical form of an extracted answer: "72" for `$72.00`, `\\sqrt{2}` for `\\sqrt2`, "paris" for
    `**Paris.**`.

    Answers that `compare` finds equal without algebra have the same form, except percents and rounded decimals.
    Answers that are equal only by algebra may have different forms, for example `x + 1` and `1 + x`.
    """
    return _form(read_answer(text)) or " ".join(text.split())


def _form(answer: Answer) -> str:
    if answer.number is not None:
        return str(answer.number.value) + "%" * answer.number.percent
    if answer.words is not None:
        return answer.words
    if answer.qualified is not None:
        rest, words = answer.qualified
        return f"{_form(rest)} {words}"
    if answer.ratio is not None:
        return ":".join(map(_form, answer.ratio))
    if answer.latex is None or (answer.bare.isalpha() and len(answer.bare) > 1):  # "No" is a word, "N" a variable
        return plain_words(answer.bare)
    if answer.named is not None:
        return _form(answer.named[1])
    if answer.radical is not None:
        return _radical(answer.radical)
    if answer.elements is None:
        return answer.tight
    items = [canonical_answer(item) for item in answer.elements.items]
    if not answer.elements.ordered:
        items = sorted(set(items))
    opening, closing = _split("()" if answer.elements.brackets == _ANGLES else answer.elements.brackets)
    return f"{opening}{', '.join(items)}{closing}"


def _radical(radical: Radical) -> str:
    root = f"\\sqrt{{{radical.square}}}" if radical.square != 1 or not radical.pi else ""
    pi = f"\\pi^{{{radical.pi}}}" if radical.pi else ""
    return "-" * (radical.sign < 0) + root + pi


def _split(brackets: str) -> tuple[str, str]:
    """Splits a pair of brackets such as "[)" or "\\{\\}" in two."""
    half = len(brackets) // 2
    return brackets[:half], brackets[half:]


_TOKEN = re.compile(r"\\[{}]|\\[A-Za-z]+|[()\[\]{},]")
_OPENING = {"(": 1, "[": 1, "{": 1, r"\{": 1, r"\langle": 1}
_CLOSING = {")": 1, "]": 1, "}": 1, r"\}": 1, r"\rangle": 1}
_ROUND_OR_SQUARE = ("(", "[", ")", "]")
_ANGLES = r"\langle\rangle"
_THOUSANDS = re.compile(r"[0-9],[0-9]{3}(?![0-9])")


@dataclass(frozen=True)
class Elements:
    """The elements in a pair of brackets."""

    brackets: str
    """Both brackets, such as "[)" for a half-open interval; empty for a list without brackets."""
    items: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        """Whether the elements form a tuple, a vector or an interval, not a set or a list."""
        return bool(self.brackets) and (self.brackets[0] in _ROUND_OR_SQUARE or self.brackets == _ANGLES)


def split_elements(latex: str) -> Elements | None:
    """Returns the elements of `latex`, at least two; None if `latex` is not a tuple, an interval, a set or a list.

    If commas in a list may also separate thousands, only a comma before a blank separates elements: "1,234, 5,678" are
    two numbers.
    """
    tokens = list(_TOKEN.finditer(latex))
    if not any(token[0] == "," for token in tokens):
        return None
    first, last = tokens[0], tokens[-1]
    enclosed = first.start() == 0 and last.end() == len(latex) and first[0] in _OPENING and last[0] in _CLOSING
    depth, cuts = 0, []
    for token in tokens:
        depth += _OPENING.get(token[0], 0) - _CLOSING.get(token[0], 0)
        if depth < 0:
            return None
        if depth == 0 and token is not last:
            enclosed = False  # the first bracket closes before the end: "(1,2) ∪ (3,4)"
    if depth:
        return None
    for token in tokens:
        depth += _OPENING.get(token[0], 0) - _CLOSING.get(token[0], 0)
        if token[0] == "," and depth == int(enclosed):
            cuts.append(token.start())
    brackets = first[0] + last[0] if enclosed else ""
    if brackets[:1] not in _ROUND_OR_SQUARE and _THOUSANDS.search(latex):
        cuts = [cut for cut in cuts if latex[cut + 1 : cut + 2] == " "]
    if not cuts:
        return None
    start, end = (first.end(), last.start()) if enclosed else (0, len(latex))
    edges = [start, *(cut + 1 for cut in cuts)], [*cuts, end]
    elements = Elements(brackets, tuple(latex[a:b].strip() for a, b in zip(*edges, strict=True)))
    return elements if all(elements.items) else None
