"""Files and folders that exist completely or not at all, also after a kill or a power cut.

A new file's name survives a power cut only after its folder was synced.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
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


@contextlib.contextmanager
def complete_file(path: Path, *, mode: int | None = 0o644, several: bool = False) -> Iterator[Path]:
    """Yields a temporary path next to `path`, which becomes `path` when the block ends without an error.

    A reader, or a restart after a crash, finds either the old file or the new file. `mode`: the file's permissions;
    None: as the block leaves them. `several`: several processes may write the file at the same time, also from other
    machines. Raises OSError.
    """
    # Processes in containers have the same process ids, and different host names.
    end = f"{socket.gethostname()}.{os.getpid()}" if several else "new"
    temporary = path.with_name(f".{path.name}.{end}")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        if mode is not None:
            temporary.chmod(mode)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: bytes, *, mode: int = 0o644, several: bool = False) -> None:
    """Writes a file completely or not at all, as `complete_file` does. Raises OSError.

    Until the file is complete, only its owner can read it.
    """
    with complete_file(path, mode=mode, several=several) as temporary:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # through no link
        with os.fdopen(handle, "wb") as file:
            file.write(content)
