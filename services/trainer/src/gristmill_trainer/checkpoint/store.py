"""The checkpoints of one run, and the checkpoint to resume from: `--resume auto|never|PATH`."""

from __future__ import annotations

import itertools
import logging
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from gristmill.internal import foreign
from gristmill.internal.disk import sync
from gristmill_trainer.checkpoint.contents import (
    OPTIMIZER,
    STATE,
    Checkpoint,
    Progress,
    checkpoints_in,
    remedy,
    verify,
    write_manifest,
)
from gristmill_trainer.checkpoint.digests import DigestWriter
from gristmill_trainer.disk import writing
from gristmill_trainer.errors import CheckpointError, FencedError
from gristmill_trainer.model_state import LearnerState, SavedState

_LOG = logging.getLogger(__name__)


class CheckpointStore:
    """Checkpoint folders such as step-000020 in `folder`; the last `kept` stay.

    The folder may also contain checkpoints of an earlier, deleted run of the same id. The store does not change them,
    and ignores them unless the user names them.
    """

    def __init__(self, folder: Path, kept: int, creation: str = "") -> None:
        """`creation`: `RunRecord.creation` of the run."""
        self.folder = folder.resolve()
        self._kept = kept
        self._creation = creation
        self.folder.mkdir(parents=True, exist_ok=True)

    def clean(self) -> None:
        """Finishes or removes what a killed trainer was writing. The caller has the run: until then, another trainer
        may be writing."""
        for leftover in (*self.folder.glob(".*.partial"), *self.folder.glob(".*.removed")):
            _remove(leftover)
        # A kill between the two renames of `save` leaves the old checkpoint only under this name.
        for replaced in self.folder.glob(".*.replaced"):
            name = replaced.name[1:].removesuffix(".replaced")
            if (self.folder / name).exists():
                _remove(replaced)
            else:
                replaced.rename(self.folder / name)

    def newest(self, *, own: bool = True, strict: bool = True) -> Path | None:
        """Returns the folder with the highest policy version, or None.

        The highest step may be older: a run that returned from step 20 to step 10 has its newest weights at step 15.
        `own`: of this creation of the run; else of earlier runs of the same id.
        `strict`: raises CheckpointError for a folder whose version cannot be read, instead of leaving the folder out.
        """
        checkpoints = self._by_version(read_progress if strict else _readable_progress, own=own)
        return checkpoints[-1] if checkpoints else None

    def is_own(self, progress: Progress) -> bool:
        """Whether a checkpoint was made in this creation of the run."""
        return progress.creation == self._creation

    @staticmethod
    def peek(path: Path) -> Checkpoint:
        """Reads a checkpoint without a check of its files. Raises CheckpointError."""
        return Checkpoint(path.absolute(), read_progress(path))

    def load(self, path: Path) -> Checkpoint:
        """Verifies every file of a checkpoint of this or another run. Raises CheckpointError."""
        verify(path.absolute())
        return self.peek(path)

    def save(
        self,
        learner: SavedState,
        progress: Progress,
        digests: DigestWriter | None = None,
    ) -> Checkpoint:
        """Writes a checkpoint and returns when it is on disk under its name. Every rank calls it; rank 0 writes.

        `digests`: receives the checkpoint's row, on rank 0.

        Raises CheckpointError if it cannot be written. Raises FencedError if a newer trainer of the run has already
        written this step: this trainer was replaced, as while its machine slept.
        """
        name = f"step-{progress.step:06d}"
        # A trainer that was paused may still write the same step, under an older version.
        path, partial = self.folder / name, self.folder / f".{name}.{progress.version}.partial"
        remedy = "The previous checkpoint stays, and a restarted trainer continues from it"
        try:
            with writing(path, CheckpointError, remedy):
                _write(partial, learner, progress)
        except CheckpointError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        learner.dist.on_main(lambda: self._rename(partial, path, progress, digests))
        return Checkpoint(path, progress)

    def _rename(self, partial: Path, path: Path, progress: Progress, digests: DigestWriter | None) -> None:
        """Gives a whole checkpoint its name `path`, in place of one of the same step, and removes old checkpoints."""
        name = path.name
        replaced = path.with_name(f".{name}.replaced")
        if path.exists():
            existing = _readable_progress(path)
            if existing is not None and not self.is_own(existing):  # Keep it, because the user named it.
                path.rename(_free(path.with_name(f"{name}-of-{(existing.creation or 'unknown')[:8]}")))
            elif existing is not None and existing.version > progress.version:
                shutil.rmtree(partial)
                raise FencedError(
                    "fenced",
                    f"checkpoint {path} is of version {existing.version}, and version {progress.version} does not "
                    "replace it: a newer trainer has taken the run. Leave the run to that one",
                    path=path,
                    found=str(existing.version),
                    version=str(progress.version),
                )
            else:  # The run resumed from an older checkpoint and reached this step again.
                path.rename(replaced)
        if digests is not None:
            digests.append(partial, progress)
        partial.rename(path)
        sync(self.folder)
        if replaced.exists():
            _remove(replaced)
        self._prune()

    @staticmethod
    def restore(checkpoint: Checkpoint, learner: LearnerState) -> None:
        """Restores the optimizer.

        Every rank calls it; rank 0 reads the file. The model is loaded separately. Raises CheckpointError.
        """
        if not learner.dist.is_main:
            learner.load_state({})
            return
        state = _load(checkpoint.path / OPTIMIZER)
        try:
            learner.load_state(state)
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                "checkpoint_mismatch",
                f"{checkpoint.path / OPTIMIZER} is of another model or optimizer: {error}. "
                "Resume with the settings that it was written with.",
                path=checkpoint.path / OPTIMIZER,
            ) from error
        _LOG.info("resumed from %s", checkpoint.path)

    def _prune(self) -> None:
        """Removes all own checkpoints except the last `kept`. Each is renamed before its files are removed.

        A checkpoint whose version cannot be read stays.
        """
        for old in self._by_version(_readable_progress)[: -self._kept]:
            _remove(old.rename(old.with_name(f".{old.name}.removed")))

    def _by_version(self, read: Callable[[Path], Progress | None], *, own: bool = True) -> list[Path]:
        """Returns the folders of this creation of the run, or of the others, in the order of their versions."""
        checkpoints = [(progress, path) for path in checkpoints_in(self.folder) if (progress := read(path)) is not None]
        chosen = [(progress.version, path) for progress, path in checkpoints if self.is_own(progress) == own]
        return [path for _, path in sorted(chosen)]


def read_progress(path: Path) -> Progress:
    """Reads the progress of a checkpoint without a check of its other files. Raises CheckpointError."""
    try:
        return msgspec.json.decode(foreign.read_file(path.resolve() / STATE), type=Progress)
    except (OSError, foreign.ForeignFileError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "checkpoint_unreadable", f"{path / STATE} is not readable ({error}). {remedy(path)}", path=path / STATE
        ) from error


def _remove(path: Path) -> None:
    """Removes a folder, or a link that a user put in place of a checkpoint."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _write(folder: Path, learner: SavedState, progress: Progress) -> None:
    """Writes all files. The model is on disk before the optimizer's state is gathered, because each may be large."""
    learner.dist.on_main(folder.mkdir)
    learner.save_model(folder)
    optimizer = learner.state()

    def finish() -> None:
        _save(optimizer, folder / OPTIMIZER)
        (folder / STATE).write_bytes(msgspec.json.encode(progress))
        write_manifest(folder)
        for entry in (*folder.rglob("*"), folder):
            sync(entry)

    learner.dist.on_main(finish)


def _load(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            "checkpoint_unreadable", f"{file} is not readable: {error}. {remedy(file.parent)}", path=file
        ) from error
    return state


def _save(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # torch reports a full disk by RuntimeError, without the system's reason.
        with path.open("ab") as file:
            file.write(bytes(1 << 20))
        raise OSError(f"{path.name}: {error}") from error


def _free(path: Path) -> Path:
    """Returns `path`, with a number appended if that name exists."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], numbered) if not name.exists())


def _readable_progress(path: Path) -> Progress | None:
    """Returns the progress; None, with a warning, if it cannot be read."""
    try:
        return read_progress(path)
    except CheckpointError as error:
        _LOG.warning("%s", error)
        return None


@dataclass(frozen=True)
class Resumption:
    """Where a training begins: at a checkpoint, or at the first weights."""

    checkpoint: Checkpoint | None = None
    """None: the first weights."""
    own: bool = True
    """Whether the checkpoint is from this creation of this run. From another run's checkpoint, the trainer takes
    weights and optimizer; steps restart."""
    origin: str | None = None
    """Written to the `Progress` of every later checkpoint."""

    @property
    def weights(self) -> str | None:
        """The checkpoint's folder."""
        return None if self.checkpoint is None else str(self.checkpoint.path)

    @property
    def progress(self) -> Progress | None:
        """Progress of this run, whose covered groups the API settles; None at its beginning."""
        return self.checkpoint.progress if self.checkpoint is not None and self.own else None

    @property
    def step(self) -> int:
        """Optimizer steps that this run has done."""
        return 0 if self.progress is None else self.progress.step

    @property
    def covered(self) -> list[str]:
        return [] if self.progress is None else self.progress.covered

    @property
    def skipped(self) -> list[str]:
        return [] if self.progress is None else list(self.progress.skipped)

    @property
    def version(self) -> str | None:
        return None if self.progress is None else str(self.progress.version)


def find_resumption(
    store: CheckpointStore, resume: str, load: Callable[[Path], Checkpoint] | None = None
) -> Resumption:
    """Returns where the training begins. Raises CheckpointError.

    If `resume` is a path, this training begins at that checkpoint. A trainer that is restarted with the same arguments
    continues from the newest checkpoint since then. `load`: default is `store.load`, which verifies every file.
    """
    load = load or store.load
    if resume == "never":
        current = store.newest()
        newest = current or store.newest(own=False, strict=False)
        if newest is not None:
            raise CheckpointError(
                "checkpoints_exist",
                f"resume is 'never', but the run has checkpoints, the newest in {newest}; "
                f"remove {store.folder}, begin a run under another RUN_ID, or resume: "
                f"--resume {'auto' if current else newest}",
                newest=newest,
            )
        return Resumption()
    if resume == "auto":
        newest = store.newest()
        if newest is not None:
            checkpoint = load(newest)
            return Resumption(checkpoint, origin=checkpoint.progress.origin)
        other = store.newest(own=False, strict=False)
        if other is not None:
            # Its groups and steps do not belong to this run. Starting without an error would lose its training.
            raise CheckpointError(
                "checkpoint_of_earlier_run",
                f"checkpoint {other} is of an earlier run of this id, which was deleted or lost with the API's data. To"
                f" continue from its weights: --resume {other}. To begin from the first weights: move {store.folder} "
                "away, or choose another run id (RUN_ID, or --run_id)",
                path=other,
            )
        return Resumption()
    named, newest = Path(resume).resolve(), store.newest(strict=False)
    # Check this before the named folder, because the run may have pruned that folder.
    if newest is not None and read_progress(newest).origin == str(named):
        checkpoint = load(newest)
        _LOG.info("resume names %s, and this run has gone on from there to step %d", named, checkpoint.step)
        return Resumption(checkpoint, origin=str(named))
    if not (named / STATE).is_file():
        checkpoints = checkpoints_in(store.folder)
        raise CheckpointError(
            "checkpoint_missing",
            f"resume is '{resume}', which is not a folder of a checkpoint; "
            f"it is auto, never, or a folder such as runs/RUN/checkpoints/step-000020. This run's: "
            f"{', '.join(map(str, checkpoints)) or 'none'}",
            resume=resume,
            known=checkpoints,
        )
    checkpoint = load(named)
    # A user may have moved a checkpoint of this run, and put a link in its place.
    here = store.folder in (named.parent, Path(resume).absolute().parent.resolve())
    own = here and store.is_own(checkpoint.progress)
    return Resumption(checkpoint, own=own, origin=str(named))
