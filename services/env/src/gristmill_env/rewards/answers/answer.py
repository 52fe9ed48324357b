"""An answer in comparable form: a number, words, or a mathematical expression."""

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
    """One extracted or reference answer, parsed once."""

    bare: str
    """The answer's text after normalization by `undressed`."""
    number: Number | None
    """Set if the answer is one number and nothing else."""
    words: str | None
    """The words, if the whole answer is `\\text{...}`. They are compared as words."""
    latex: str | None
    """The LaTeX for the symbolic checker; None if the answer is prose."""

    @property
    def readable(self) -> bool:
        """Whether the answer can be compared with other answers."""
        return self.number is not None or self.words is not None or self.latex is not None

    @property
    def is_relation(self) -> bool:
        """Whether the answer is an equation, an inequality, or a membership."""
        return _RELATION.search(self.bare) is not None

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
        return Answer(bare="", number=None, words=None, latex=None)
    return _read(text)


@lru_cache(maxsize=4096)
def _read(text: str) -> Answer:
    bare = undressed(text)
    number = undressed_number(bare)
    return Answer(bare, number, words_of(bare), mathematics(bare) if number is None else number.latex)
