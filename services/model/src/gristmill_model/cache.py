"""Folders of built models: whole or not there.

A folder is made under a temporary name and renamed, under a lock; a kill in the middle leaves only a temporary folder,
which the next start sweeps away.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

BUILDING = ".building-"
DIGEST_FILE = ".sha256.json"


@contextmanager
def locked(models_dir: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two starts do not build the same model, and sweep what a kill left behind."""
    models_dir.mkdir(parents=True, exist_ok=True)
    with (models_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when the process ends, however it ends
        for leftover in models_dir.glob(f"{BUILDING}*"):
            shutil.rmtree(leftover)
        yield


def built(models_dir: Path, name: str, build: Callable[[Path], None]) -> Path:
    """`models_dir`/`name`, made by `build(empty folder)` if it is not there yet. Call with the lock held."""
    final = models_dir / name
    if final.is_dir():
        return final
    temporary = Path(tempfile.mkdtemp(dir=models_dir, prefix=BUILDING))
    build(temporary)
    digest(temporary)
    _open_to_readers(temporary)
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    temporary.rename(final)
    _sync(models_dir)
    return final


def link_or_copy(source: Path, target: Path) -> None:
    """Put `source`'s content at `target`: a hard link where the file system can, so that big weights cost nothing."""
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def digest(folder: Path) -> str:
    """SHA-256 over names and contents of the folder's weight files, kept beside them when the folder is ours."""
    kept = folder / DIGEST_FILE
    if kept.is_file():
        return str(json.loads(kept.read_text())["sha256"])
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            total.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    if folder.name.startswith(BUILDING):
        kept.write_text(json.dumps({"sha256": total.hexdigest()}) + "\n")
    return total.hexdigest()


def _open_to_readers(folder: Path) -> None:
    """Environment and trainer read the folder under their own ids; `save_pretrained` and `mkdtemp` shut them out."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        if path.stat().st_mode & 0o444 != 0o444:
            path.chmod(0o644)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
