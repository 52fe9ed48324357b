"""Errors of full disks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from gristmill.errors import FileError
from gristmill_trainer.errors import TrainerError


@contextmanager
def writing(path: Path, kind: type[TrainerError] = TrainerError, remedy: str = "") -> Iterator[None]:
    """Converts errors of a full or broken disk to an error of `kind` that names the file or folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = FileError.of(error) if isinstance(error, OSError) and error.errno else error
        raise kind("write_failed", f"{path} cannot be written: {why}. {remedy}".strip(), path=path) from error
