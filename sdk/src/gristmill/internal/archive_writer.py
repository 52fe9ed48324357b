"""Appends groups to the segments of one run. Blocking: its callers run it on a thread.

The trajectory API writes the acked groups to `<run>/rollouts`, and the trainer its records of them to `<run>/trained`.

Several API processes take turns to write to one folder. A process that continues another's segment finds the groups
that the segment has already (`RunWriter.holds`), so a process that was killed after a write causes no second copy. Two
processes write at once only if one of them was paused inside a write for longer than its lease. Each group is one write
to a file that is opened for appending, so the writes of two processes never mix. A group may then be in the file twice,
and readers handle that.

After a failed fsync the kernel keeps the data in memory, marks them as written, and reports the error only once. So a
writer makes a segment read-only whose fsync failed. No writer appends to such a segment or counts its groups as held:
they are written again, to a new segment.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.archive import segment
from gristmill.archive.segment import ArchiveError
from gristmill.internal.disk import make_folder, sync
from gristmill.internal.logs import line

_LOG = logging.getLogger(__name__)
SEGMENT_BYTES = 64 << 20
MIN_FREE_BYTES = 2 << 30
"""Free space that the archive and the trainer's records leave on their disk, by default."""
_SEGMENTS_A_RUN = 8
_WRITABLE, _NOT_SYNCED = 0o644, 0o444
"""Modes of a segment. The second mode marks it for all processes. It need not survive a power cut: then readers see
which bytes are on disk."""
_failed: set[Path] = set()
"""Segments whose fsync failed in this process. After the failure a file system may take no other mode."""
_RECENT_BYTES = 96 << 20
"""Bytes of the newest segments whose ids a writer reads when it opens. The API writes less between two calls of `sync`:
16 MiB and one group of at most API_MAX_BODY_BYTES."""


class NoRoomError(OSError):
    """The disk has less free space than the archive must leave, and the archive has no older segment to remove."""


def free_bytes(folder: Path) -> int:
    """Bytes that are free on the disk of the folder, or of its nearest parent that exists. Raises OSError."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


@dataclass(frozen=True)
class _Tail:
    """The newest segment, as a crash left it."""

    path: Path
    size: int
    run: tuple[str, int] | None
    """Run id and creation; None when not even its opening is whole."""
    sound: bool
    """False: damaged before its end, or its fsync failed. It is left as it is."""


class RunWriter:
    """The archive of one run. Methods raise OSError. After any other than NoRoomError, `sync` the groups before it and
    open another writer."""

    def __init__(
        self,
        folder: Path,
        run_id: str,
        created_ms: int,
        max_bytes: int,
        min_free_bytes: int = 0,
        on_removed: Callable[[Sequence[str], str], None] | None = None,
    ) -> None:
        """`folder`: such as <run>/rollouts, made when missing. `max_bytes`: the most that all segments may take
        together. `min_free_bytes`: free space that the archive leaves on its disk. `on_removed`: receives the ids of
        groups in a segment that is removed to keep a bound, and the bound: "max_bytes" or "disk"."""
        self._folder = folder
        self._run = (run_id, created_ms)
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._on_removed = on_removed
        # A cap below a few segments is kept by smaller ones: only whole segments can go.
        self._segment_bytes = min(SEGMENT_BYTES, max_bytes // _SEGMENTS_A_RUN)
        self._file: int | None = None
        self._size = 0
        self._unsure = False
        self._older: list[tuple[Path, int]] = []
        self._held: frozenset[str] = frozenset()
        make_folder(folder)
        self._resume()

    def holds(self, group_id: str) -> bool:
        """Returns whether an earlier writer wrote the group shortly before it ended. `sync` waits for its bytes too."""
        return group_id in self._held

    def append(self, group_id: str, schema: str, stored: bytes) -> None:
        """Write one group; on disk after `sync`. `stored`: its bytes."""
        record = segment.record(group_id, schema, stored)
        self.make_room(len(record))
        if self._file is None or self._size + len(record) > self._segment_bytes:
            self._begin()
        self._shrink(self._max_bytes - self._size - len(record))
        self._write(record)

    def make_room(self, size: int = 0) -> None:
        """Remove the oldest segments until `size` bytes can be written and the disk's floor is kept.

        Raises NoRoomError if only the newest segment is left and the free space is still too small.
        """
        while self._min_free_bytes and (free := free_bytes(self._folder)) - size < self._min_free_bytes:
            if not self._older:
                raise NoRoomError(
                    f"{self._folder}: {free} bytes are free on this disk, and its writer keeps "
                    f"{self._min_free_bytes} free"
                )
            oldest, _ = self._older.pop(0)
            self._remove(oldest, "disk")
            _LOG.warning(
                line("archive", run=self._run[0], removed=oldest.name, free=free, why="the disk is nearly full")
            )

    def sync(self) -> None:
        """Returns once all that was appended is on disk, in a file that is still there."""
        if self._unsure:
            raise OSError(f"{self._current}: the disk failed, and reports a failure only once")
        if self._file is not None:
            self._flush()
            if not os.path.samestat(os.fstat(self._file), self._current.stat()):
                raise OSError(f"{self._current} was replaced while it was written")

    def _flush(self, *, name_too: bool = False) -> None:
        """Syncs the segment, and its name in the folder. Marks the segment if that fails."""
        assert self._file is not None
        try:
            os.fsync(self._file)
            if name_too:
                sync(self._folder)
        except OSError:
            self._unsure = True
            _failed.add(self._current)
            with contextlib.suppress(OSError):
                os.fchmod(self._file, _NOT_SYNCED)
            raise

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _resume(self) -> None:
        """Go on with the newest segment, less its torn end, when it is of this run."""
        self._older = [(path, path.stat().st_size) for path in segment.files(self._folder)]
        if not self._older:
            return
        tail = _look(self._older[-1][0])
        if tail.run is None and tail.sound:
            tail.path.unlink()
            self._older.pop()
        elif tail.run == self._run and tail.sound:
            self._older.pop()
            self._file = os.open(tail.path, os.O_WRONLY | os.O_APPEND)
            self._size = tail.size
            os.ftruncate(self._file, tail.size)
            self._current = tail.path
        self._held = self._recent_ids()

    def _recent_ids(self) -> frozenset[str]:
        """Returns the ids in this run's newest segments. A torn end is cut before."""
        ids: list[str] = []
        size = 0
        newest = [] if self._file is None else [(self._current, self._size)]
        for path, count in (*newest, *reversed(self._older)):
            if size >= _RECENT_BYTES or _run_of(path) != self._run:
                break
            ids += _ids(path) if _is_synced(path) else []
            size += count
        return frozenset(ids)

    def _begin(self) -> None:
        if self._file is not None:
            self.sync()
            self.close()
            self._older.append((self._current, self._size))
        number = int(self._older[-1][0].stem) + 1 if self._older else 1
        self._current = self._folder / f"{number:06}{segment.SUFFIX}"
        self._file = os.open(self._current, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, _WRITABLE)
        self._size = 0
        self._write(segment.opening(*self._run))
        self._flush(name_too=True)

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        written = os.write(self._file, data)
        if written < len(data):  # The disk is full. The next attempt starts at the same place.
            os.ftruncate(self._file, self._size)
            raise OSError(f"{self._current}: only {written} of {len(data)} bytes could be written")
        self._size += written

    def _shrink(self, budget: int) -> None:
        """Remove the oldest segments until those before the current one take `budget` bytes at most."""
        while self._older and sum(size for _, size in self._older) > budget:
            self._remove(self._older.pop(0)[0], "max_bytes")

    def _remove(self, path: Path, bound: str) -> None:
        """Reports the ids of a segment and removes it. In this order a crash leaves the group, the report, or both."""
        ids = _ids(path) if self._on_removed is not None else ()
        if self._on_removed is None or not ids:
            path.unlink(missing_ok=True)
            return
        try:
            self._on_removed(ids, bound)
        except OSError:  # The disk may have no room for the report before the segment is gone.
            path.unlink(missing_ok=True)
            self._on_removed(ids, bound)
        path.unlink(missing_ok=True)


def _run_of(path: Path) -> tuple[str, int] | None:
    """Returns id and creation of the segment's run; None if the segment is missing or damaged at its beginning."""
    try:
        with path.open("rb") as file:
            opening = segment.read_opening(file, str(path))
    except (FileNotFoundError, ArchiveError):
        return None
    return None if opening is None else (opening.run_id, opening.created_ms)


def _ids(path: Path) -> list[str]:
    """Returns the ids of the segment's groups; none if it is missing or damaged at its beginning."""
    try:
        with path.open("rb") as file:
            return [] if segment.read_opening(file, str(path)) is None else list(segment.read_ids(file))
    except (FileNotFoundError, ArchiveError):
        return []


def _is_synced(path: Path) -> bool:
    """Returns False for a segment whose fsync failed, and for a missing segment."""
    try:
        return path not in _failed and bool(path.stat().st_mode & (_WRITABLE & ~_NOT_SYNCED))
    except FileNotFoundError:
        return False


def _look(path: Path) -> _Tail:
    if not _is_synced(path):
        return _Tail(path, 0, None, sound=False)
    with path.open("rb") as file:
        try:
            opening = segment.read_opening(file, str(path))
            if opening is None:
                return _Tail(path, 0, None, sound=True)
            size = file.tell()
            for _, _, end in segment.read_frames(file, str(path)):
                size = end
        except ArchiveError:
            return _Tail(path, 0, None, sound=False)
        return _Tail(path, size, (opening.run_id, opening.created_ms), sound=True)
