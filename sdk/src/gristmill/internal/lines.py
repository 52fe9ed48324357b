"""Files of JSON Lines, which several processes may append to and read while they grow.

A kill may leave a torn last line. Readers leave it out, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self, TypeVar

import msgspec

from gristmill.internal import foreign
from gristmill.internal.disk import write_file

_LOG = logging.getLogger(__name__)
_BLOCK: Final = 1 << 16
_FILES: Final = 48
"""Files whose objects are kept: two of each of the 24 runs that the page compares."""
_MOST_BYTES: Final = 512 << 20
"""Most bytes of a file that are read at once."""
MAX_LINE: Final = 256 << 20
"""Most bytes of a line."""
T = TypeVar("T")


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

    def append(self, *lines: bytes, sync: bool = True) -> None:
        """Appends lines, given without newlines. Raises OSError, and then the file has none of them.

        `sync`: the lines survive a power cut when this returns. Without it they survive a kill of the process. After a
        failed fsync the kernel counts the lines as written, so the next fsync would report no error.
        """
        content = b"".join(line + b"\n" for line in lines)
        with self._turn, self._locked():
            size = self._end_last_line()
            try:
                written = 0
                while written < len(content):
                    written += os.write(self._file, content[written:])
                if sync:
                    os.fsync(self._file)
            except OSError:
                with contextlib.suppress(OSError):  # else the caller would see this error, and not the cause
                    os.ftruncate(self._file, size)
                raise

    def close(self) -> None:
        """Closes the file after the appends of other threads, which releases its lock. Later calls have no effect."""
        with self._turn:
            handle, self._file = self._file, -1
            if handle >= 0:
                os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

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

    def _end_last_line(self) -> int:
        """Removes a torn last line, or adds the newline that is missing. Returns the size."""
        size = end = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - _BLOCK)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end == size:
            return size
        if _is_complete(os.pread(self._file, size - end, end)):
            os.write(self._file, b"\n")
            return size + 1
        os.ftruncate(self._file, end)
        return end


class JsonlWriter:
    """Appends objects to a file, one per line. Each line is on disk before `append` returns."""

    def __init__(self, path: Path, keep: Callable[[Mapping[str, Any]], bool] | None = None) -> None:
        """Opens `path` for appending. Removes a torn last line and the lines for which `keep` returns False."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            rows = [row for row in read_jsonl(path) if keep is None or keep(row)]
            write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self._lines = LineFile(path)

    def append(self, row: msgspec.Struct | Mapping[str, Any]) -> None:
        self._lines.append(msgspec.json.encode(row))

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their numbers from 1. Skips a torn last line with a warning."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        if not line.endswith(b"\n") and not _is_complete(line):
            _LOG.warning("line %d of %s, the last, was torn; it is left out", number, Path(file.name))
        else:
            yield number, line


def whole_lines(file: BinaryIO, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, line) of the lines from byte `start`. Leaves out a last line without a newline: it may grow.

    A line of more than `MAX_LINE` bytes comes in pieces, which are not valid JSON.
    """
    file.seek(start)
    while line := file.readline(MAX_LINE):
        if not line.endswith(b"\n") and len(line) < MAX_LINE:
            return
        yield start, line
        start += len(line)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns the file's objects. Leaves out a last line without a newline, which a kill tore, and damaged lines."""
    with path.open("rb") as file:
        return [row for _, line in whole_lines(file) if (row := decode_line(line)) is not None]


def decoded(decoder: msgspec.json.Decoder[T], line: bytes) -> T | None:
    """Returns what the decoder makes of a line; None for a damaged, too deeply nested or unknown line."""
    try:
        return decoder.decode(line)
    except (ValueError, RecursionError):
        return None


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line of JSON; None for another value and for a damaged or too deeply nested line."""
    try:
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError:  # NaN, which Python's json writes and JSON does not have
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # Half of a surrogate pair is not text that JSON can hold.
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


@dataclass
class _Known:
    """The part of a file that was read."""

    inode: int
    end: int = 0
    """Byte after the last whole line."""
    last: bytes = b""
    """The last whole line with its newline. If it is not at its place any more, another file has the inode."""
    rows: list[dict[str, Any]] = field(default_factory=list)


_known: OrderedDict[Path, _Known] = OrderedDict()
_lock = threading.Lock()


def read_growing_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of another's file as `read_jsonl` does, and reads only the lines that are new since the last
    call, for example for a page that stays open.

    Do not change the objects: later calls return them again. Raises ForeignFileError, and OSError.
    """
    with _lock, foreign.open_file(path) as file:
        stat = os.fstat(file.fileno())
        state = _known.pop(path, None)
        if state is None or not _continues(state, file, stat):
            state = _Known(stat.st_ino)
        if stat.st_size - state.end > _MOST_BYTES:
            text = f"{path} has {stat.st_size} bytes, more than a run's files of lines have; remove or shorten it"
            raise foreign.ForeignFileError("file_too_large", text, path=path)
        for start, line in whole_lines(file, state.end):
            state.end, state.last = start + len(line), line
            if (row := decode_line(line)) is not None:
                state.rows.append(row)
        _known[path] = state
        while len(_known) > _FILES:
            _known.popitem(last=False)
        return list(state.rows)


def _continues(known: _Known, file: Any, stat: os.stat_result) -> bool:
    if stat.st_ino != known.inode or stat.st_size < known.end:
        return False
    file.seek(known.end - len(known.last))
    return bool(file.read(len(known.last)) == known.last)


def _is_complete(line: bytes) -> bool:
    """Returns False for a torn line, because no prefix of a JSON object is valid JSON.

    Files that were written by hand or concatenated often end without a newline.
    """
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except ValueError:
        return False
    return True
