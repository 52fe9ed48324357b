"""Where a training goes on from: `--resume auto|never|PATH`."""

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
    """A checkpoint, and what the run's new trainer says of it."""

    checkpoint: Checkpoint
    own: bool
    """Of this creation of this run. Another's lends weights, optimizer and random numbers; steps and schedule begin
    again."""
    origin: str | None
    """Goes into the `Progress` of every checkpoint that follows."""

    @property
    def step(self) -> int:
        """Optimizer steps that this run has behind it."""
        return self.checkpoint.step if self.own else 0

    @property
    def covered(self) -> list[str]:
        """Groups for the API to settle: another run's are not this run's."""
        return self.checkpoint.covered if self.own else []

    @property
    def skipped(self) -> list[str]:
        """Files of the steps that this run last skipped in a row."""
        return list(self.checkpoint.progress.skipped) if self.own else []


def find_resumption(store: CheckpointStore, resume: str) -> Resumption | None:
    """None: begin from the first weights. Raises CheckpointError for what cannot be resumed from.

    A folder that is named is where this training began. A trainer that is started again with the same words goes on
    from the newest checkpoint since then, not from the beginning once more.
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
    # Before the folder itself is looked at: the run may have pruned it since.
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
    """Neither its groups nor its steps are this run's, and beginning without a word would lose what it learned."""
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
