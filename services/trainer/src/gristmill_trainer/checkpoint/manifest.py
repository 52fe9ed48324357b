"""The SHA-256 of every file of a checkpoint, to find disk errors before training continues from the files."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from gristmill_trainer.errors import CheckpointError

MANIFEST = "manifest.json"


class File(msgspec.Struct, frozen=True):
    size: int
    """Bytes."""
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    files: dict[str, File]
    """Files by path within the folder."""
    format: int = 1


def write_manifest(folder: Path) -> None:
    """Writes a manifest of the files that are in the folder now."""
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(Manifest(_files(folder)))))


def verify(folder: Path) -> None:
    """Raises CheckpointError with the path of a file that is missing or changed."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(
            "checkpoint_manifest_missing",
            f"checkpoint {folder} has no {MANIFEST}: it was written before checkpoints were checked, or by something "
            f"else. {remedy(folder)}",
            path=folder / MANIFEST,
        ) from error
    except msgspec.MsgspecError as error:
        raise CheckpointError(
            "checkpoint_unreadable",
            f"{folder / MANIFEST} is not readable ({error}). {remedy(folder)}",
            path=folder / MANIFEST,
        ) from error
    found = _files(folder)
    for name, written in manifest.files.items():
        there = found.get(name)
        if there is None:
            raise CheckpointError(
                "checkpoint_file_missing",
                f"checkpoint {folder} has lost its {name}. {remedy(folder)}",
                path=folder / name,
            )
        if there != written:
            raise CheckpointError(
                "checkpoint_damaged",
                f"{folder / name} is not as it was written ({there.size} bytes, SHA-256 {there.sha256[:12]}...; "
                f"written were {written.size}, {written.sha256[:12]}...). {remedy(folder)}",
                path=folder / name,
            )


def remedy(folder: Path) -> str:
    """Returns advice for a checkpoint that cannot be used."""
    others = sorted(path for path in folder.parent.glob("step-*") if path != folder)
    if not others:
        return f"It is the only one: remove {folder} to begin from the first weights, or name another by --resume PATH."
    return f"Remove {folder} to resume from one before it, or name one: --resume {others[-1]}"


def _files(folder: Path) -> dict[str, File]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor(max_workers=4) as pool:  # Hashing releases the GIL.
        return dict(zip((str(path.relative_to(folder)) for path in paths), pool.map(_hashed, paths), strict=True))


def _hashed(path: Path) -> File:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return File(size=file.tell(), sha256=digest)
