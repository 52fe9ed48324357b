"""What a reward may look at, and what it may say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One completion to be scored. A reward asks for any of these by the names of its arguments."""

    completion: str
    """The completion's text, special tokens left out."""
    answer: str | None = None
    """The row's `answer_field`; None when the run has none."""
    prompt: str = ""
    """The row's `prompt_field`."""
    tokens: Sequence[int] = ()
    """The completion's token ids, as sampled."""
    finish_reason: str = "stop"
    """Why the completion ended: "stop", or "length" when it was cut."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row."""


INPUTS = tuple(f.name for f in fields(Sample))
"""Names that a reward may ask for."""


@dataclass(frozen=True)
class Score:
    """What the rewards said of one completion."""

    total: float | None
    """Sum of weight × value over the parts that have a value; None when no part has, or one failed."""
    parts: Mapping[str, float | None]
    """Value of each reward, before its weight; None where it said nothing."""
    error: str | None = None
    """The reward that failed, and how."""
