"""Fields of a row, by path: `answer`, `metadata.answer_cot`, `choices.text.0`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class NoFieldError(Exception):
    """A path does not exist in the row."""

    def __init__(self, name: str, there: Sequence[str]) -> None:
        """`name`: the missing part of the path; `there`: the names that exist at that place."""
        super().__init__(name)
        self.name = name
        self.there = list(there)


def lookup(row: Mapping[str, Any], path: str) -> Any:
    """Returns the value at `path`. A column with exactly that name overrides a path into another column.

    Raises NoFieldError for a missing part.
    """
    if path in row:
        return row[path]
    here: Any = row
    for part in path.split("."):
        if isinstance(here, Mapping):
            if part not in here:
                raise NoFieldError(part, list(here))
            here = here[part]
        elif isinstance(here, Sequence) and not isinstance(here, str):
            if not part.lstrip("-").isdigit() or not -len(here) <= int(part) < len(here):
                raise NoFieldError(part, [f"{len(here)} entries from 0"])
            here = here[int(part)]
        else:
            raise NoFieldError(part, [f"no fields but {here!r:.40}"])
    return here
