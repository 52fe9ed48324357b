"""Files that a command writes whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gristmill_env.errors import SavedError


@contextmanager
def new_file(path: Path | None, source: Path) -> Iterator[Path | None]:
    """A path to write to, which becomes `path` when all went well and goes when not; None for None.

    `source`: what is read meanwhile. Raises SavedError when `path` is there already: nothing is written over.
    """
    if path is None:
        yield None
        return
    if path.exists():
        if source.exists() and path.samefile(source):
            raise SavedError("output_is_input", f"{path} is the file that is read; choose another --out", path=path)
        raise SavedError("output_exists", f"{path} exists already; choose another --out, or remove it", path=path)
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        yield temporary
        if temporary.exists():
            temporary.replace(path)
    except OSError as error:
        raise SavedError("output_unwritable", f"cannot write {path}: {error.strerror}", path=path) from error
    finally:
        temporary.unlink(missing_ok=True)
