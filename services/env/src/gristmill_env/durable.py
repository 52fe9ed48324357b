"""Files that survive a kill: files that exist completely or not at all, and files of lines.

A kill may leave a torn last line in a file of JSON Lines. Readers skip the torn line, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from gristmill.disk import sync

logger = logging.getLogger(__name__)

_BLOCK = 1 << 16


@contextlib.contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path, which becomes `path` when the block ends without an error. Raises OSError.

    A reader, or a restart after a crash, finds either the old file or the new file.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file completely or not at all. Raises OSError."""
    with complete_file(path) as temporary:
        temporary.write_bytes(content)


class LineFile:
    """A file of JSON Lines, open for appending. Several processes and threads may append, and their lines never mix.

    Before a line is written, a torn last line is removed, and a complete last line gets its newline.
    """

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        """Opens `path`, or creates it. `exclusive`: no other process may open it so until this file is closed.

        Raises OSError; BlockingIOError when another process has the file open exclusively.
        """
        self._exclusive = exclusive
        self._turn = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        if exclusive:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._end_last_line()
            except OSError:
                self.close()
                raise

    def append(self, line: bytes, *, sync: bool = True) -> None:
        """Appends a line, given without its newline. Raises OSError.

        `sync`: the line survives a power cut when this returns. Without it the line survives a kill of the process.
        """
        with self._turn, self._locked():
            self._end_last_line()
            content = line + b"\n"
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
            if sync:
                os.fsync(self._file)

    def close(self) -> None:
        """Closes the file, which releases its lock."""
        os.close(self._file)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._exclusive:  # locked since it was opened
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

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
        if _is_complete(os.pread(self._file, size - end, end)):
            os.write(self._file, b"\n")
        else:
            os.ftruncate(self._file, end)


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their numbers from 1. Skips a torn last line with a warning."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        if not line.endswith(b"\n") and not _is_complete(line):
            logger.warning("line %d of %s, the last, was torn; it is left out", number, Path(file.name))
        else:
            yield number, line


def _is_complete(line: bytes) -> bool:
    """Returns False for a torn line, because no prefix of a JSON object is valid JSON.

    Files that were written by hand or concatenated often end without a newline.
    """
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
