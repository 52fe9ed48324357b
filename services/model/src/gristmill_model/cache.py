"""Folders of built models, which are either complete or do not exist.

Under a lock, a build writes a folder under a temporary name and then renames it. A kill during the build leaves only a
temporary folder, which the next start deletes.
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

from gristmill.internal.disk import sync
from gristmill_model.revision import fingerprint

BUILDING = ".building-"
DIGEST_FILE = ".sha256.json"


@contextmanager
def locked(models_dir: Path) -> Iterator[None]:
    """Holds the folder's lock, so that two starts do not build the same model. Deletes folders of killed builds."""
    models_dir.mkdir(parents=True, exist_ok=True)
    with (models_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases the lock when the process ends, even if killed
        for leftover in models_dir.glob(f"{BUILDING}*"):
            shutil.rmtree(leftover)
        yield


def built(models_dir: Path, name: str, build: Callable[[Path], None]) -> Path:
    """Returns `models_dir`/`name`. If it does not exist, `build(empty folder)` fills it. The caller holds the lock."""
    final = models_dir / name
    if final.is_dir():
        return final
    temporary = Path(tempfile.mkdtemp(dir=models_dir, prefix=BUILDING))
    build(temporary)
    kept = {"sha256": digest(temporary), "folder": name}
    (temporary / DIGEST_FILE).write_text(json.dumps(kept) + "\n")
    _open_to_readers(temporary)
    for path in (*temporary.iterdir(), temporary):
        sync(path)
    temporary.rename(final)
    sync(models_dir)
    return final


def link_or_copy(source: Path, target: Path) -> None:
    """Puts `source`'s content at `target`: by a hard link if possible, so that big weights take no extra space."""
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def digest(folder: Path) -> str:
    """Returns the SHA-256 over names and contents of the folder's weight files.

    A built folder keeps the digest in `DIGEST_FILE`. In a copy of the folder, the weights may be others.
    """
    if (kept := _kept_digest(folder)) is not None:
        return kept
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            total.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _kept_digest(folder: Path) -> str | None:
    file = folder / DIGEST_FILE
    kept = json.loads(file.read_text()) if file.is_file() else {}
    return str(kept["sha256"]) if kept.get("folder") == folder.name else None


def name_of_copy(folder: Path, kind: str) -> str:
    """Returns the name of a built folder that is made from a model. It changes with a user's folder, as `revision`."""
    return f"{folder.name}-{kind}" if _kept_digest(folder) else f"{folder.name}-{fingerprint(folder)}-{kind}"


def _open_to_readers(folder: Path) -> None:
    """Makes the folder readable for environment and trainer, which run under other user ids.

    `mkdtemp` and `save_pretrained` create folders and files that other users cannot read.
    """
    folder.chmod(0o755)
    for path in folder.iterdir():
        if path.stat().st_mode & 0o444 != 0o444:
            path.chmod(0o644)
