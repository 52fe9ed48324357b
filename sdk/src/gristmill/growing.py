"""Files of lines that grow while they are read again and again, such as the metrics of a run with an open page."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gristmill import foreign
from gristmill.metrics import decode_line

_FILES: Final = 64
_MOST_BYTES: Final = 512 << 20
"""Most bytes of a file that are read at once."""


@dataclass
class _Known:
    """The part of a file that was read."""

    inode: int
    end: int = 0
    """Byte after the last whole line."""
    last: bytes = b""
    """The last whole line. If it is not at its place any more, another file has the inode."""
    rows: list[dict[str, Any]] = field(default_factory=list)


_known: OrderedDict[Path, _Known] = OrderedDict()
_lock = threading.Lock()


def read_growing_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns the file's objects as `read_jsonl` does, and reads only the lines that are new since the last call.

    Do not change the objects: later calls return them again.
    """
    with _lock, foreign.open_file(path) as file:
        stat = os.fstat(file.fileno())
        known = _known.pop(path, None)
        if known is None or not _continues(known, file, stat):
            known = _Known(stat.st_ino)
        file.seek(known.end)
        if stat.st_size - known.end > _MOST_BYTES:
            text = f"{path} has {stat.st_size} bytes, more than a run's files of lines have; remove or shorten it"
            raise foreign.ForeignFileError("file_too_large", text, path=path)
        whole, newline, _ = file.read(_MOST_BYTES).rpartition(b"\n")
        if newline:
            lines = whole.split(b"\n")
            known.rows += [row for row in map(decode_line, lines) if row is not None]
            known.end += len(whole) + 1
            known.last = lines[-1]
        _known[path] = known
        while len(_known) > _FILES:
            _known.popitem(last=False)
        return list(known.rows)


def _continues(known: _Known, file: Any, stat: os.stat_result) -> bool:
    if stat.st_ino != known.inode or stat.st_size < known.end:
        return False
    file.seek(max(0, known.end - len(known.last) - 1))
    return bool(file.read(len(known.last) + 1) == known.last + b"\n") or known.end == 0
