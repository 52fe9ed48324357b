"""Output files that a command writes completely or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gristmill_env.errors import SavedError


@contextmanager
def new_file(path: Path | None, source: Path) -> Iterator[Path | None]:
    """Yields a temporary path that becomes `path` on success and is removed on failure; yields None for None.

    `source`: the file that is read meanwhile. Raises SavedError when `path` exists, because nothing is overwritten.
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
