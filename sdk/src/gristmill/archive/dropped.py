"""The content of dropped groups: `<run>/dropped/<reason>.jsonl`, one JSON object per line.

The environment writes a line before it drops the group, so the content exists when `drops.jsonl` has the group's fate.
A line is a saved group of the environment's format, from which this module reads the fields that the table of rollouts
shows. A full file becomes `<reason>.1.jsonl`, so each reason keeps the content of its newest groups.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from gristmill import foreign
from gristmill.archive.drops import Drop

DROPPED_FOLDER: Final = "dropped"
_LONGEST: Final = 32 << 20
"""Bytes of a line; the environment writes shorter ones. Another's file may hold anything."""
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=1 << 14)]
_REASON: Final = re.compile(r"[a-z0-9_]{1,64}")


def dropped_files(reason: str) -> tuple[str, str]:
    """Returns the paths of a reason's older and newer file in the run's folder."""
    return f"{DROPPED_FOLDER}/{reason}.1.jsonl", f"{DROPPED_FOLDER}/{reason}.jsonl"


class DroppedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of a dropped group. An unfinished one is a conversation in which the environment failed."""

    text: str
    messages: _Messages | None = None
    """The turns after the group's messages, if there is more than one reply."""
    tokens: _Count | None = None
    finish_reason: str | None = None
    scores: dict[str, float | None] = {}
    total: float | None = None
    error: str | None = None
    errors: dict[str, str] = {}
    """The error of each failed reward by the reward's name."""

    @property
    def why(self) -> str | None:
        """All errors of the completion as one text."""
        return "; ".join(f"{name}: {text}" for name, text in self.errors.items()) or self.error


class _Sampling(msgspec.Struct, frozen=True):
    temperature: float | None = None


class _Id(msgspec.Struct, frozen=True):
    group_id: str
    creation_ms: int


class DroppedGroup(_Id, frozen=True, kw_only=True):
    """The content of a dropped group."""

    env_id: str | None = None
    index: _Count | None = None
    """Index of the row in the data set, from 0."""
    error: str | None = None
    """The error for which the group was dropped."""
    prompt: str = ""
    prompt_text: str | None = None
    """The prompt as the model saw it; None if it was not made."""
    prompt_tokens: _Count | None = None
    messages: _Messages | None = None
    answer: str | None = None
    seconds: float | None = None
    sampling: _Sampling | None = None
    versions: list[str] = []
    completions: Annotated[list[DroppedCompletion], msgspec.Meta(max_length=1 << 14)] = []


_ID = msgspec.json.Decoder(_Id)
_GROUP = msgspec.json.Decoder(DroppedGroup)


class DroppedContents:
    """Finds the content of dropped groups. The files of a reason are searched once, when the first group asks."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """`folders`: the run's folders, absolute and without links. Links in them are not followed."""
        self._folders = folders
        self._places: dict[str, dict[tuple[int, str], tuple[Path, int]]] = {}

    def of(self, drop: Drop) -> DroppedGroup | None:
        """Returns a group's content; None if it was not kept."""
        if drop.what != "dropped" or drop.reason is None or not _REASON.fullmatch(drop.reason):
            return None
        if drop.reason not in self._places:
            self._places[drop.reason] = self._search(drop.reason)
        place = self._places[drop.reason].get((drop.creation, drop.group_id))
        return None if place is None else _read_at(*place, drop)

    def _search(self, reason: str) -> dict[tuple[int, str], tuple[Path, int]]:
        found = {}
        for path in (folder / name for folder in self._folders for name in dropped_files(reason)):
            try:
                opened = foreign.open_file(path)
            except (FileNotFoundError, foreign.ForeignFileError):
                continue
            start = 0
            with opened as file:
                while line := file.readline(_LONGEST):
                    try:
                        one = _ID.decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError):  # a torn line
                        pass
                    else:
                        found[one.creation_ms, one.group_id] = (path, start)
                    start += len(line)
        return found


def _read_at(path: Path, start: int, drop: Drop) -> DroppedGroup | None:
    """Returns the group at a place; None if the file was replaced since it was searched."""
    try:
        with foreign.open_file(path) as file:
            file.seek(start)
            found = _GROUP.decode(file.readline(_LONGEST))
    except (FileNotFoundError, foreign.ForeignFileError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if (found.creation_ms, found.group_id) == (drop.creation, drop.group_id) else None
