"""Opens files that another service or another person wrote: their contents, names and kinds are data.

Who writes a volume may put a symbolic link, a FIFO, a device or a folder where a reader expects a file. These functions
open regular files only. They follow no link in any part of the path, and no FIFO makes them wait.

A path must be absolute and without links. So a reader resolves the folder that its user named, which may be a link, and
adds the names below that folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Final

from gristmill.errors import GristmillError

SMALL: Final = 64 << 20
"""Most bytes of a file that is read whole, such as run.json."""
TOKENIZER: Final = 256 << 20
"""Most bytes of a tokenizer.json."""
_FOLDER: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class ForeignFileError(GristmillError):
    """A path leads over a link, or is not a regular file, or the file is too large."""


def open_file(path: Path) -> BufferedReader:
    """Opens a regular file for reading. Raises ForeignFileError, and OSError such as FileNotFoundError."""
    if not path.is_absolute() or ".." in path.parts:
        raise _refused(path, "is not an absolute path")
    root, *folders, name = path.parts
    here = os.open(root, _FOLDER)
    try:
        for part in folders:
            below = _entered(part, here, path)
            os.close(here)
            here = below
        _check_regular(os.stat(name, dir_fd=here, follow_symlinks=False), path)
        # Another file may have the name now, so the file that is open counts.
        handle = os.open(name, _FILE, dir_fd=here)
    finally:
        os.close(here)
    try:
        _check_regular(os.fstat(handle), path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_file(path: Path, most: int = SMALL) -> bytes:
    """Returns the bytes of a regular file of at most `most` bytes. Raises as `open_file` does."""
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ForeignFileError(
            "file_too_large", f"{path} has more than {most} bytes; no program of Gristmill writes it so", path=path
        )
    return content


def is_file(path: Path) -> bool:
    """Returns whether the path is a regular file and leads over no link."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Returns whether the path is a folder and leads over no link."""
    return stat.S_ISDIR(_mode(path))


def entries(folder: Path) -> Iterator[Path]:
    """Yields the regular files and the folders in a folder by name; none if the folder itself is a link."""
    if is_folder(folder):
        with os.scandir(folder) as scanned:
            names = [
                one.name for one in scanned if one.is_file(follow_symlinks=False) or one.is_dir(follow_symlinks=False)
            ]
        yield from (folder / name for name in sorted(names))


def _mode(path: Path) -> int:
    """Returns the kind of the path; 0 if it does not exist or leads over a link."""
    try:
        return path.lstat().st_mode if os.path.realpath(path) == os.fspath(path) else 0
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return 0


def _entered(part: str, above: int, path: Path) -> int:
    try:
        return os.open(part, _FOLDER, dir_fd=above)
    except NotADirectoryError as error:  # also what O_DIRECTORY says of a link
        raise _refused(path, f"leads over {part!r}, which is a link or no folder") from error
    except OSError as error:
        if stat.S_ISLNK(os.stat(part, dir_fd=above, follow_symlinks=False).st_mode):
            raise _refused(path, f"leads over {part!r}, which is a link") from error
        raise


def _check_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _refused(path, "is a link, a folder, a FIFO or a device")


def _refused(path: Path, why: str) -> ForeignFileError:
    text = f"{path} {why}; Gristmill reads regular files of a run only: remove it, or put the file itself there"
    return ForeignFileError("file_not_regular", text, path=path)
