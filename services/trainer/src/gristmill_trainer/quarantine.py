"""Quarantine for batches that gave no finite gradient. The trainer keeps and counts them, and stops after too many."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gristmill import TrajectoryGroup
from gristmill.internal.disk import write_file
from gristmill_trainer.disk import writing
from gristmill_trainer.errors import TrainerError

_LOG = logging.getLogger(__name__)


class SkipRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch was quarantined: the JSON file next to its groups. Non-finite numbers are the words "nan", "inf"."""

    step: int
    version: str
    """Policy version of the weights that computed the batch's gradient."""
    problem: str
    """Such as "the gradient norm is nan"."""
    loss: str
    grad_norm: str
    group_ids: list[str]


def quarantine(folder: Path, groups: Sequence[TrajectoryGroup], record: SkipRecord) -> Path:
    """Writes the groups in the API's batch format (BATCH_MEDIA_TYPE) under an unused number. Returns their file.

    The files are step-000012.1.groups and step-000012.1.json, for example.
    """
    number = 1
    while (path := folder / f"step-{record.step:06d}.{number}.groups").exists():
        number += 1
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(record)))
        write_file(path, msgspec.msgpack.encode([group.encode() for group in groups]))
    return path


def read_quarantine(path: Path) -> tuple[list[TrajectoryGroup], SkipRecord]:
    """Reads a .groups file and the .json file next to it."""
    groups = [TrajectoryGroup.decode(body) for body in msgspec.msgpack.decode(path.read_bytes(), type=list[bytes])]
    return groups, msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=SkipRecord)


@dataclass
class SkippedSteps:
    """Counts consecutive steps that trained nothing or left an update out.

    A skipped step uses up its groups and its step number. Its version is published with the weights that the valid
    updates gave. The API counts permits by steps, so repeating the number would ask for groups that never come.
    """

    allowed: int
    """Most consecutive skipped steps; one more ends the training."""
    files: list[str] = field(default_factory=list)
    """Group files of the current consecutive skips. Every checkpoint stores them, so a restart keeps the count."""

    def skipped(self, file: Path, problem: str) -> None:
        self.files.append(str(file))
        _LOG.warning("step not trained on, or not on all of it: %s; its groups are kept in %s", problem, file)

    @property
    def too_many(self) -> bool:
        return len(self.files) > self.allowed

    def raise_if_too_many(self) -> None:
        """Raises TrainerError after too many skips. Called after a checkpoint stores the skips, and at each resume."""
        if self.too_many:
            raise TrainerError(
                "too_many_skipped_steps",
                f"{len(self.files)} steps in a row were not trained on, or not on all of them. Their groups are kept, "
                f"each with its reasons in a .json file: {', '.join(self.files)}. Look at them; begin a run from a "
                "checkpoint (RUN_ID=..., --resume PATH), as with a lower learning_rate or max_grad_norm, or with a "
                "higher max_skipped_steps",
                files=list(self.files),
            )

    def trained(self) -> None:
        """Resets the count after a step with only finite updates."""
        self.files.clear()
