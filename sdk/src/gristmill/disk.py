"""Files and folders that survive a power cut. A new file's name does so only after its folder was synced."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's entries, to disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Makes the folder and its missing parents, which are on disk when this returns. Raises OSError."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        try:
            sync(one.parent)
        except OSError:
            with contextlib.suppress(OSError):  # Else the next call finds the folder, and does not sync its name.
                one.rmdir()
            raise
