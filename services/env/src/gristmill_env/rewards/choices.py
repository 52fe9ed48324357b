"""The choices of a multiple-choice row, and functions that find a choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill_env.answers.latex import plain_words, undressed
from gristmill_env.errors import RewardError


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
    return plain_words(undressed(text))
