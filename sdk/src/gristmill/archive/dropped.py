"""The content of dropped groups: `<run>/dropped/<reason>.jsonl`, in the format of `gristmill.internal.saved`.

The environment writes a line before it drops the group, so the content exists when `drops.jsonl` has the group's fate.
A full file becomes `<reason>.1.jsonl`, so each reason keeps the content of its newest groups.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from gristmill.archive.drops import Drop
from gristmill.internal import foreign
from gristmill.internal.lines import decoded, whole_lines
from gristmill.internal.saved import SavedGroup, saved_groups

DROPPED_FOLDER: Final = "dropped"
_REASON: Final = re.compile(r"[a-z0-9_]{1,64}")


def dropped_files(reason: str) -> tuple[str, str]:
    """Returns the paths of a reason's older and newer file in the run's folder."""
    return f"{DROPPED_FOLDER}/{reason}.1.jsonl", f"{DROPPED_FOLDER}/{reason}.jsonl"


class _Id(msgspec.Struct, frozen=True):
    group_id: str
    creation_ms: int


_ID = msgspec.json.Decoder(_Id)


class DroppedContents:
    """Finds the content of dropped groups. The files of a reason are searched once, when the first group asks."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """`folders`: the run's folders, absolute and without links. Links in them are not followed."""
        self._folders = folders
        self._places: dict[str, dict[tuple[int, str], tuple[Path, int]]] = {}

    def of(self, drop: Drop) -> SavedGroup | None:
        """Returns a group's content; None if it was not kept."""
        if drop.what != "dropped" or drop.reason is None or not _REASON.fullmatch(drop.reason):
            return None
        if drop.reason not in self._places:
            self._places[drop.reason] = self._search(drop.reason)
        place = self._places[drop.reason].get((drop.creation, drop.group_id))
        return None if place is None else _read_at(*place, drop)

    def _search(self, reason: str) -> dict[tuple[int, str], tuple[Path, int]]:
        groups = {}
        for path in (folder / name for folder in self._folders for name in dropped_files(reason)):
            try:
                opened = foreign.open_file(path)
            except (FileNotFoundError, foreign.ForeignFileError):
                continue
            with opened as file:
                for start, line in whole_lines(file):
                    if (one := decoded(_ID, line)) is not None:
                        groups[one.creation_ms, one.group_id] = (path, start)
        return groups


def _read_at(path: Path, start: int, drop: Drop) -> SavedGroup | None:
    """Returns the group at a place; None if the file was replaced since it was searched."""
    try:
        with foreign.open_file(path) as file:
            group = next(saved_groups(file, start), None)
    except (FileNotFoundError, foreign.ForeignFileError):
        return None
    if group is None or (group.creation_ms, group.group_id) != (drop.creation, drop.group_id):
        return None
    return group
