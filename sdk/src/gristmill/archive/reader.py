"""Reads the rollouts of a run, one group in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gristmill.archive import segment
from gristmill.archive.segment import ArchivedGroup, ArchiveError
from gristmill.group import TrajectoryGroup


def read_rollouts(folder: str | Path) -> Iterator[TrajectoryGroup]:
    """The trained groups of a run in the order of their acks. `folder`: "runs/quickstart", or its rollouts/.

    Each id comes once, although a crash of the API may have written a group twice. A run that was deleted and created
    again under the same id is another run: its groups follow the older run's, and may have the ids of those. The
    oldest groups of a long run may be gone (API_ARCHIVE_MAX_BYTES). May be called while the run goes on; a group that
    is being written is left out.

    Raises ArchiveError for a folder without rollouts, for a damaged segment, and for rollouts that came through
    Atropos' protocol, which carry no policy versions: `read_archive` reads those.
    """
    for archived in read_archive(folder):
        if archived.schema != "group":
            raise ArchiveError(
                "archive_schema",
                f"{folder} holds groups of schema {archived.schema!r}, which are no TrajectoryGroups; "
                "gristmill.read_archive gives their bytes",
                schema=archived.schema,
            )
        yield TrajectoryGroup.decode(archived.body)


def read_archive(folder: str | Path) -> Iterator[ArchivedGroup]:
    """As `read_rollouts`, but every kind of group, as the bytes that were submitted."""
    run: tuple[str, int] | None = None
    seen: set[str] = set()
    for path in segments(folder):
        try:
            file = path.open("rb")
        except FileNotFoundError:
            continue  # The size cap took it since the folder was listed.
        with file:
            opening = segment.read_opening(file, str(path))
            if opening is None:
                continue
            if run != (opening.run_id, opening.created_ms):
                run = (opening.run_id, opening.created_ms)
                seen.clear()
            for frames, head_size, _ in segment.read_frames(file, str(path)):
                group = segment.parse(frames, head_size)
                if group.group_id not in seen:
                    seen.add(group.group_id)
                    yield group


def segments(folder: str | Path) -> list[Path]:
    """A run's segments, oldest first. Raises ArchiveError when there is no such folder."""
    rollouts = Path(folder) / "rollouts"
    if not rollouts.is_dir() and Path(folder).name == "rollouts":
        rollouts = Path(folder)
    if not rollouts.is_dir():
        raise ArchiveError(
            "no_archive",
            f"{folder} has no rollouts: the trajectory API archives acked groups to <run>/rollouts",
            folder=folder,
        )
    found = [path for path in rollouts.glob(f"*{segment.SUFFIX}") if path.stem.isdecimal()]
    return sorted(found, key=lambda path: int(path.stem))
