"""The checkpoint to resume from: `--resume auto|never|PATH`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from gristmill_trainer.checkpoint.contents import STATE, Checkpoint
from gristmill_trainer.checkpoint.store import CheckpointStore, read_progress
from gristmill_trainer.errors import CheckpointError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumption:
    """A checkpoint to resume from, and its relation to the run."""

    checkpoint: Checkpoint
    own: bool
    """Whether the checkpoint is from this creation of this run. From another run's checkpoint, the trainer takes
    weights, optimizer and random numbers; steps and schedule restart."""
    origin: str | None
    """Written to the `Progress` of every later checkpoint."""

    @property
    def step(self) -> int:
        """Optimizer steps that this run has done."""
        return self.checkpoint.step if self.own else 0

    @property
    def covered(self) -> list[str]:
        """Ids of the groups that the API settles; empty for another run's checkpoint."""
        return self.checkpoint.covered if self.own else []

    @property
    def skipped(self) -> list[str]:
        """Files of this run's last consecutive skipped steps."""
        return list(self.checkpoint.progress.skipped) if self.own else []


def find_resumption(store: CheckpointStore, resume: str) -> Resumption | None:
    """Returns the checkpoint to resume from; None to begin from the first weights. Raises CheckpointError.

    If `resume` is a path, this training begins at that checkpoint. A trainer that is restarted with the same arguments
    continues from the newest checkpoint since then.
    """
    if resume == "never":
        newest = store.newest() or store.newest_foreign()
        if newest is not None:
            raise CheckpointError(
                "checkpoints_exist",
                f"resume is 'never', but the run has checkpoints, the newest in {newest}; "
                f"remove {store.folder}, begin a run under another RUN_ID, or resume: --resume auto",
                newest=newest,
            )
        return None
    if resume == "auto":
        newest = store.newest()
        if newest is not None:
            return _own(store.load(newest))
        foreign = store.newest_foreign()
        if foreign is not None:
            raise _of_an_earlier_run(store, foreign)
        return None
    named, newest = Path(resume).resolve(), store.newest_readable()
    # Check this before the named folder, because the run may have pruned that folder.
    if newest is not None and read_progress(newest).origin == str(named):
        checkpoint = store.load(newest)
        _LOG.info("resume names %s, and this run has gone on from there to step %d", named, checkpoint.step)
        return _own(checkpoint)
    if not (named / STATE).is_file():
        raise _no_checkpoint(store, resume)
    checkpoint = store.load(named)
    own = named.parent == store.folder and store.is_own(checkpoint.progress)
    return Resumption(checkpoint, own=own, origin=str(named))


def _own(checkpoint: Checkpoint) -> Resumption:
    return Resumption(checkpoint, own=True, origin=checkpoint.progress.origin)


def _of_an_earlier_run(store: CheckpointStore, found: Path) -> CheckpointError:
    """Returns the error for an earlier run's checkpoint.

    Its groups and steps do not belong to this run. Starting without an error would lose its training.
    """
    why = (
        "does not record in which creation of the run it was made, so it may be of a run that was deleted since"
        if read_progress(found).creation is None
        else "is of an earlier run of this id, which was deleted or lost with the API's data"
    )
    return CheckpointError(
        "checkpoint_of_earlier_run",
        f"checkpoint {found} {why}. To continue from its weights: --resume {found}. To begin from the first weights: "
        f"move {store.folder} away, or choose another run id (RUN_ID)",
        path=found,
    )


def _no_checkpoint(store: CheckpointStore, resume: str) -> CheckpointError:
    known = sorted(store.folder.glob("step-*"))
    return CheckpointError(
        "checkpoint_missing",
        f"resume is '{resume}', which is no folder of a checkpoint; "
        f"it is auto, never, or a folder such as runs/RUN/checkpoints/step-000020. This run's: "
        f"{', '.join(map(str, known)) or 'none'}",
        resume=resume,
        known=known,
    )
