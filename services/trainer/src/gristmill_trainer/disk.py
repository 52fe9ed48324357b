"""Durable files, and errors of full disks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from gristmill_trainer.errors import TrainerError


@contextmanager
def writing(path: Path, kind: type[TrainerError] = TrainerError, remedy: str = "") -> Iterator[None]:
    """Converts errors of a full or broken disk to an error of `kind` that names the file or folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise kind("write_failed", f"{path} cannot be written: {error}. {remedy}".strip(), path=path) from error


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
