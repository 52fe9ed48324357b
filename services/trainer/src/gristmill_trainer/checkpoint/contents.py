"""The contents of a checkpoint, and their digests.

step-000020/
  config.json, model.safetensors, ...   the model in Hugging Face's format
  optimizer.pt                          state of the optimizer
  trainer_state.json                    `Progress`
  manifest.json                         SHA-256 of every file above, to find disk errors before training continues
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gristmill import PolicyVersion
from gristmill.internal import foreign
from gristmill_trainer.errors import CheckpointError

OPTIMIZER = "optimizer.pt"
STATE = "trainer_state.json"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d+(-of-.+)?")


@dataclass(frozen=True)
class Progress:
    """Progress of the training."""

    step: int
    """Optimizer steps done, skipped ones included."""
    version: PolicyVersion
    """Version of these weights. Versions only rise, so a run's newest checkpoint has the highest version."""
    last_batch: str | None = None
    """Id of the last trained batch."""
    covered: list[str] = field(default_factory=list)
    """Ids of the groups trained since the previous checkpoint; the run's next trainer settles them."""
    skipped: list[str] = field(default_factory=list)
    """Files of the consecutive skipped steps up to this step (`SkippedSteps`)."""
    origin: str | None = None
    """The checkpoint folder that `resume` named when this training began."""
    creation: str = ""
    """`RunRecord.creation` of the run. When a run is deleted and created again, group ids restart, so steps and groups
    are only valid in their own creation. Empty: unknown."""
    model_sha256: str | None = None
    """`Manifest.sha256` of the model before any training, which adapters need; None: unknown."""


@dataclass(frozen=True)
class Checkpoint:
    """One folder whose files passed verification."""

    path: Path
    progress: Progress

    @property
    def step(self) -> int:
        return self.progress.step

    def check_base(self, model: str, sha256: str | None) -> None:
        """Raises CheckpointError if the adapters of this checkpoint were trained on other weights than `model`.

        `sha256`: `Manifest.sha256` of `model`; None: unknown."""
        trained_on = self.progress.model_sha256
        if None not in (trained_on, sha256) and trained_on != sha256:
            raise CheckpointError(
                "checkpoint_mismatch",
                f"the adapters in {self.path} were trained on a model with the SHA-256 {trained_on}, and {model} has "
                f"{sha256}. Start the model server with the model of the training (MODEL in .env)",
                path=self.path,
            )


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
    manifest = read_manifest(folder)
    files = _files(folder)
    for name, written in manifest.files.items():
        recorded = files.get(name)
        if recorded is None:
            raise CheckpointError(
                "checkpoint_file_missing",
                f"checkpoint {folder} has lost its {name}. {remedy(folder)}",
                path=folder / name,
            )
        if recorded != written:
            raise CheckpointError(
                "checkpoint_damaged",
                f"{folder / name} is not as it was written ({recorded.size} bytes, SHA-256 {recorded.sha256[:12]}...; "
                f"written were {written.size}, {written.sha256[:12]}...). {remedy(folder)}",
                path=folder / name,
            )


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest without a check of the files. Raises CheckpointError."""
    try:
        return msgspec.json.decode(foreign.read_file(folder.resolve() / MANIFEST), type=Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(
            "checkpoint_manifest_missing",
            f"checkpoint {folder} has no {MANIFEST}: it was written before checkpoints were checked, or by something "
            f"else. {remedy(folder)}",
            path=folder / MANIFEST,
        ) from error
    except (OSError, foreign.ForeignFileError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "checkpoint_unreadable",
            f"{folder / MANIFEST} is not readable ({error}). {remedy(folder)}",
            path=folder / MANIFEST,
        ) from error


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the folders, or links to folders, with the name of a checkpoint."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir())


def remedy(folder: Path) -> str:
    """Returns advice for a checkpoint that cannot be used."""
    others = [path for path in checkpoints_in(folder.parent) if path != folder]
    if not others:
        return f"It is the only one: remove {folder} to begin from the first weights, or name another by --resume PATH."
    return f"Remove {folder} to resume from one before it, or name one: --resume {others[-1]}"


def _files(folder: Path) -> dict[str, File]:
    """Returns the regular files. A link, a FIFO or a device in place of a file counts as missing."""
    folder = folder.resolve()
    paths = sorted(path for path in folder.rglob("*") if foreign.is_file(path) and path.name != MANIFEST)
    with ThreadPoolExecutor(max_workers=4) as pool:  # Hashing releases the GIL.
        return dict(zip((str(path.relative_to(folder)) for path in paths), pool.map(_hashed, paths), strict=True))


def _hashed(path: Path) -> File:
    with foreign.open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return File(size=file.tell(), sha256=digest)
