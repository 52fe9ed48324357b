"""A reward for the right choice of a multiple-choice question."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from gristmill_env.answers.extraction import ANSWER_BLOCK, ANSWER_IS, after_thinking, boxes, gold_answer
from gristmill_env.answers.latex import TEXT, normalize_latex, plain_words
from gristmill_env.errors import RewardError
from gristmill_env.rewards.registry import reward

LETTERS = "ABCDEFGHIJ"

_LOOKED_AT = 300  # characters after a mark; a choice directly follows its mark
_HASHES = re.compile(r"####([^\n]*)")
_INTRODUCED = re.compile(r"(?:option|choice|letter)\s+", re.IGNORECASE)
_ALSO = re.compile(r"\s*(?:,|/|&|\bor\b|\band\b)\s*(?:option\s+|choice\s+)?", re.IGNORECASE)
_REASON = re.compile(r"\s+(?:as|because|due|for|is|since|which)\b", re.IGNORECASE)
_WORD_AFTER = re.compile(r"\s+[A-Za-z]")


def _extracted(completion: str, row: Mapping[str, Any], *, letters: str = LETTERS, **_: Any) -> str | None:
    """Returns the marked choice, such as "B", or "B, C" if marks disagree."""
    choices = Choices.of(row.get("choices"), letters)
    return ", ".join(choices.name(place) for place in sorted(set(_settled_on(completion, choices)))) or None


@reward("mcq", extract_answer=_extracted)
def mcq(
    completion: str,
    answer: str,
    row: Mapping[str, Any],
    *,
    letters: Annotated[str, Field(min_length=2)] = LETTERS,
    first_index: int = 0,
) -> float | None:
    """1 when all that the completion marks as its answer is the right choice; 0 when not, or when marks disagree.

    Marks are `<answer>X</answer>`, `\\boxed{X}`, "Answer: X", "answer is (X)", `#### X` and a last line
    "(X)". In place of its letter a choice may be stated by its text, if the row has `choices`
    (a list, or ARC's {"label": [...], "text": [...]}).
    The row's answer is a label, a letter, an index, or the text of a choice, tried in that order; None
    (no score) when it matches nothing.

    Options: `letters` names the choices in order; `first_index` is the index of the first one.
    """
    choices = Choices.of(row.get("choices"), letters)
    right = choices.find_gold(gold_answer(answer), first_index)
    if right is None:
        return None
    has_letter = False
    for place in _settled_on(completion, choices):
        if place != right:
            return 0.0
        has_letter = True
    return float(has_letter)


def _settled_on(completion: str, choices: Choices) -> Iterator[int]:
    """Yields the choices that the completion marks as its answer, possibly with repetitions."""
    for text in dict.fromkeys(_marked(after_thinking(completion), choices)):
        yield from _places(text, choices)


def _marked(text: str, choices: Choices) -> Iterator[str]:
    """Yields each text that the completion marks as an answer."""
    blocks = ANSWER_BLOCK.findall(text)
    for scope in blocks or [text]:
        yield from (scope[start : min(end, start + _LOOKED_AT)] for start, end in boxes(scope))
        headings = [match[1] for match in _HASHES.finditer(scope)]
        yield from (line for line in headings if _is_bare(line, choices))
        yield from headings[-1:]
        for match in ANSWER_IS.finditer(scope):
            yield scope[match.end() : match.end() + _LOOKED_AT].lstrip(" *\n\t").partition("\n")[0]
        last_line = scope.rstrip().rpartition("\n")[2]
        if blocks or _is_bare(last_line, choices):
            yield last_line[:_LOOKED_AT]


def _is_bare(line: str, choices: Choices) -> bool:
    """Whether a line is a letter, or a digit in brackets that is the label of a choice."""
    match = re.fullmatch(r"[\s*]*(?:\(?([A-Za-z])\)?|\(([0-9])\))[\s*.]*", line)
    return match is not None and (match[2] is None or match[2] in choices.labels)


def _places(text: str, choices: Choices) -> Sequence[int]:
    """Returns the choices that a marked text names; an empty list for prose."""
    bare = TEXT.sub(r" \1 ", normalize_latex(text)).strip()
    words = plain_words(bare)  # "c" counts if it is the whole text
    if (alone := choices.find_letter(words)) is not None or (alone := choices.find_text(bare)) is not None:
        return [alone]
    places: list[int] = []
    rest = _INTRODUCED.sub("", bare, count=1) if _INTRODUCED.match(bare) else bare
    while match := re.match(r"([(\[])?([A-Za-z0-9])([)\]])?(?![\w'’+])", rest):
        place, rest = choices.find_letter(match[2]), rest[match.end() :]
        bracketed = match[3] is not None
        if place is None or not (bracketed or _is_label(match[2], rest)):
            break
        places.append(place)
        also = _ALSO.match(rest)
        if also is None:
            break
        rest = rest[also.end() :]
    return places


def _is_label(letter: str, rest: str) -> bool:
    """Whether a letter without brackets names a choice: "A good one" and "I think" do not."""
    if letter.islower() or letter.isdecimal():
        return re.match(r"[.:](?![0-9])", rest) is not None
    return (
        letter not in "AI" or not _WORD_AFTER.match(rest) or _ALSO.match(rest) is not None or bool(_REASON.match(rest))
    )


@dataclass(frozen=True)
class Choices:
    """Choices by index 0, 1, ..."""

    letters: str
    """One letter per choice."""
    texts: tuple[str, ...] = ()
    """The text of each choice, normalized to words; empty if the row has no texts."""
    labels: tuple[str, ...] = ()
    """The data set's label of each choice; empty if the data set has no labels."""

    @classmethod
    def of(cls, column: Any, letters: str) -> Choices:
        """Reads a row's `choices`: a list of texts, {"label": [...], "text": [...]}, or None.

        Raises RewardError for anything else, and when there are more choices than letters.
        """
        labels: Sequence[Any] = ()
        texts = () if column is None else column
        if isinstance(texts, Mapping):
            labels, texts = texts.get("label", ()), texts.get("text")
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise RewardError(
                "choices_invalid",
                f"mcq: a row's 'choices' are a list of texts, or lists 'label' and 'text'; not {column!r}",
            )
        if len(texts) > len(letters):
            raise RewardError(
                "too_many_choices",
                f"mcq: a row has {len(texts)} choices and there are {len(letters)} letters; set 'letters'",
                choices=len(texts),
                letters=len(letters),
            )
        return cls(
            letters[: len(texts)] if texts else letters,
            tuple(_words(str(text)) for text in texts),
            tuple(_words(str(label)) for label in labels),
        )

    def name(self, place: int) -> str:
        """Returns the label of a choice, or its letter if the choice has no label."""
        return self.labels[place].upper() if place < len(self.labels) else self.letters[place]

    def find_gold(self, answer: str, first_index: int) -> int | None:
        """Returns the index of the choice that a row's answer names by label, letter, index or text, in that order."""
        words = _words(answer)
        if (place := self.find_letter(words)) is not None:
            return place
        if words.isdecimal() and 0 <= int(words) - first_index < len(self.letters):
            return int(words) - first_index
        return self.find_text(answer)

    def find_letter(self, letter: str) -> int | None:
        """Returns the index for a label, or for a letter of either case."""
        if letter.casefold() in self.labels:
            return self.labels.index(letter.casefold())
        place = self.letters.casefold().find(letter.casefold()) if len(letter) == 1 else -1
        return place if place >= 0 else None

    def find_text(self, text: str) -> int | None:
        """Returns the index of the only choice with this text; None if no choice or several choices have it."""
        words = _words(text)
        return self.texts.index(words) if self.texts.count(words) == 1 else None


def _words(text: str) -> str:
    return plain_words(normalize_latex(text))
