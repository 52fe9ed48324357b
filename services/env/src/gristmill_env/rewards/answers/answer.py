"""An answer as it is compared: a number, words, or a piece of mathematics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from gristmill_env.rewards.answers.dress import undressed, words_of
from gristmill_env.rewards.answers.expressions import MAX_CHARS, mathematics
from gristmill_env.rewards.answers.number import Number, undressed_number
from gristmill_env.rewards.answers.radicals import Radical, radical_of, read_radical
from gristmill_env.rewards.answers.sequences import Elements, split_elements

_NAMED = re.compile(r"([A-Za-z]) ?= ?([^=<>]+)")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|in|leq|geq|neq|lt|gt|subset|equiv|approx|sim)(?![A-Za-z])")
_LOOSE_BLANK = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")


@dataclass(frozen=True)
class Answer:
    """One stated or reference answer, read once."""

    bare: str
    """As written, undressed."""
    number: Number | None
    """Set when it is one number and nothing else."""
    words: str | None
    """Set when it is all `\\text{...}`: the words, to be compared as such."""
    latex: str | None
    """What the symbolic checker is asked about; None when it is prose."""

    @property
    def readable(self) -> bool:
        """Whether anything can be compared with it."""
        return self.number is not None or self.words is not None or self.latex is not None

    @property
    def is_relation(self) -> bool:
        """An equation, an inequality, or a membership."""
        return _RELATION.search(self.bare) is not None

    @cached_property
    def radical(self) -> Radical | None:
        """Set when it is a product of fractions, square roots and π."""
        if self.number is not None:
            return radical_of(self.number)
        return None if self.latex is None else read_radical(self.latex)

    @cached_property
    def tight(self) -> str:
        """As written, without the blanks that mean nothing."""
        return _LOOSE_BLANK.sub("", self.bare)

    @cached_property
    def named(self) -> tuple[str, Answer] | None:
        """The letter and the value of `x = 5`."""
        match = _NAMED.fullmatch(self.bare)
        if match is None or re.search(rf"(?<![A-Za-z\\]){match[1]}(?![A-Za-z])", match[2]):
            return None
        value = read_answer(match[2])
        return None if value.is_relation else (match[1], value)

    @cached_property
    def elements(self) -> Elements | None:
        """Its elements, when it is a tuple, an interval, a set or a list."""
        return None if self.latex is None or self.is_relation else split_elements(self.latex)


def read_answer(text: str) -> Answer:
    """Read an answer as extracted. The answers of a group are few: what was read is remembered."""
    if len(text) > 2 * MAX_CHARS:
        return Answer(bare="", number=None, words=None, latex=None)
    return _read(text)


@lru_cache(maxsize=4096)
def _read(text: str) -> Answer:
    bare = undressed(text)
    number = undressed_number(bare)
    return Answer(bare, number, words_of(bare), mathematics(bare) if number is None else number.latex)
