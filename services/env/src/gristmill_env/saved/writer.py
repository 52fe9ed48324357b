"""Writes saved groups, each to disk before the next."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from types import TracebackType

import msgspec

from gristmill_env.errors import SavedError
from gristmill_env.saved.group import SavedGroup
from gristmill_env.saved.last_line import is_whole

_BLOCK = 1 << 16


class GroupWriter:
    """Appends groups to a JSONL file. Several processes and threads may share the file, and their lines never mix.

    Before a group is written, a torn last line after a kill is removed, and a complete last line gets its newline.
    `append` waits for the disk, so call it on a thread if an event loop is running:
    `await asyncio.to_thread(writer.append, group)`.
    """

    def __init__(self, path: Path) -> None:
        """Opens `path` for appending, and creates its folders. Raises SavedError."""
        self.path = path
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise SavedError(
                "output_unwritable", f"cannot write groups to {path}: {error.strerror}", path=path
            ) from error

    def append(self, group: SavedGroup) -> None:
        """Writes one line. Raises SavedError when the disk refuses it."""
        line = self._encoder.encode(group) + b"\n"
        try:
            with self._lock:
                fcntl.flock(self._file, fcntl.LOCK_EX)
                try:
                    self._end_last_line()
                    written = 0
                    while written < len(line):
                        written += os.write(self._file, line[written:])
                    os.fsync(self._file)
                finally:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
        except OSError as error:
            raise SavedError(
                "output_unwritable", f"cannot write groups to {self.path}: {error.strerror}", path=self.path
            ) from error

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def __enter__(self) -> GroupWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _end_last_line(self) -> None:
        size = end = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - _BLOCK)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end == size:
            return
        if is_whole(os.pread(self._file, size - end, end)):
            os.write(self._file, b"\n")
        else:
            os.ftruncate(self._file, end)
