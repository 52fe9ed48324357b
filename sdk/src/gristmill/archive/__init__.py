"""The rollouts of a run on disk: every trained group, in the order of the acks. One group is in memory at a time.

    for group in gristmill.read_rollouts("runs/quickstart"):
        print(group.group_id, group.rewards)

The trajectory API writes the rollouts. The module `segment` defines the format.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.archive import segment
from gristmill.archive.segment import ArchivedGroup, ArchiveError
from gristmill.group import TrajectoryGroup
from gristmill.internal import foreign

__all__ = ["ArchiveError", "ArchivedGroup", "GroupIndex", "read_archive", "read_rollouts", "segments"]


def read_rollouts(folder: str | Path) -> Iterator[TrajectoryGroup]:
    """Yields the trained groups of a run in the order of their acks. `folder`: "runs/quickstart", or its rollouts/.

    Each group id comes once, although a crash of the API may write a group twice. A run that was deleted and created
    again under the same id counts as another run. Its groups follow the older run's groups and may repeat their ids.
    The API may have deleted the oldest groups of a long run (API_ARCHIVE_MAX_BYTES). The run may still be open: a group
    that is being written is left out.

    Raises ArchiveError for a folder without rollouts, for a damaged segment, and for groups of another schema, such as
    the JSON that an earlier API archived. `read_archive` reads them.
    """
    for archived in read_archive(folder):
        yield decode(archived, folder)


def decode(archived: ArchivedGroup, path: str | Path) -> TrajectoryGroup:
    """Returns the group. `path`: of the archive, for the error. Raises ArchiveError for another schema than "group"."""
    if archived.schema != "group":
        raise ArchiveError(
            "archive_schema",
            f"{path} holds group {archived.group_id} of schema {archived.schema!r}, which is not a TrajectoryGroup; "
            "gristmill.read_archive gives its bytes",
            schema=archived.schema,
        )
    return TrajectoryGroup.decode(archived.body)


def read_archive(folder: str | Path, *, newest_only: bool = False) -> Iterator[ArchivedGroup]:
    """Yields groups of every schema as the submitted bytes, in the order of `read_rollouts` and each id once.

    `newest_only`: leaves out the groups of earlier runs under the same id."""
    run: tuple[str, int] | None = None
    seen: set[str] = set()
    paths = segments(folder)
    newest = _newest_creation(paths) if newest_only else None
    for path in paths:
        for opening, frames, head_size, _ in segment.read_segment(path, newest):
            if run != (opening.run_id, opening.created_ms):
                run = (opening.run_id, opening.created_ms)
                seen.clear()
            group = segment.parse(frames, head_size)
            if group.group_id not in seen:
                seen.add(group.group_id)
                yield group


def _newest_creation(paths: Sequence[Path]) -> int | None:
    """Returns the creation of the newest segment that can be read; None without one. The clock may have been set back
    between two creations, so the largest need not be the newest."""
    for path in reversed(paths):
        with contextlib.suppress(FileNotFoundError), foreign.open_file(path) as file:
            opening = segment.read_opening(file, str(path))
            if opening is not None:
                return opening.created_ms
    return None


def segments(folder: str | Path) -> list[Path]:
    """Returns the segments of a run, oldest first. Raises ArchiveError if the folder does not exist."""
    rollouts = Path(folder) / "rollouts"
    if not rollouts.is_dir() and Path(folder).name == "rollouts":
        rollouts = Path(folder)
    if not rollouts.is_dir():
        raise ArchiveError(
            "no_archive",
            f"{folder} has no rollouts: the trajectory API archives acked groups to <run>/rollouts",
            folder=folder,
        )
    return segment.files(rollouts)


@dataclass(frozen=True)
class _Place:
    path: Path
    start: int
    size: int
    head_size: int


class GroupIndex:
    """The groups of one creation of a run by id. Reads all segments once, and afterwards only the groups asked for."""

    def __init__(self, paths: Iterable[Path], created_ms: int) -> None:
        """`paths`: segments, oldest first. `created_ms`: the run's creation. Raises ArchiveError."""
        self._places: dict[str, _Place] = {}
        for path in paths:
            for _, frames, head_size, end in segment.read_segment(path, created_ms):
                place = _Place(path, end - len(frames), len(frames), head_size)
                self._places.setdefault(segment.parse_id(frames, head_size), place)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._places

    def group(self, group_id: str) -> TrajectoryGroup:
        """Returns a group. Raises KeyError for an unknown id, and ArchiveError for a group of another schema."""
        place = self._places[group_id]
        with foreign.open_file(place.path) as file:
            file.seek(place.start)
            parsed = segment.parse(file.read(place.size), place.head_size)
        return decode(parsed, place.path)
