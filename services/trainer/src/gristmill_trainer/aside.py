"""Batches that gave no gradient, or none that is finite: kept for a look, counted, and not many in a row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gristmill import TrajectoryGroup
from gristmill_trainer.disk import writing
from gristmill_trainer.errors import TrainerError

_LOG = logging.getLogger(__name__)


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch was put aside; the JSON beside its groups. Numbers that are not finite are words: "nan", "inf"."""

    step: int
    version: str
    """Of the weights that it was computed with."""
    problem: str
    """Such as "the gradient's norm is nan"."""
    loss: str
    grad_norm: str
    group_ids: list[str]


class Aside:
    """The folder `aside` of a run: step-000012.1.groups and step-000012.1.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, groups: Sequence[TrajectoryGroup], reason: Reason) -> Path:
        """The groups as the API sends batches (BATCH_MEDIA_TYPE), under a number that is free. Returns their file."""
        number = 1
        while (path := self.folder / f"step-{reason.step:06d}.{number}.groups").exists():
            number += 1
        partial = path.with_suffix(".partial")
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.msgpack.encode([group.encode() for group in groups]))
            path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(reason)))
            partial.rename(path)
        return path


def read_aside(path: Path) -> tuple[list[TrajectoryGroup], Reason]:
    """Read a .groups file and what lies beside it."""
    groups = [TrajectoryGroup.decode(body) for body in msgspec.msgpack.decode(path.read_bytes(), type=list[bytes])]
    return groups, msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Reason)


@dataclass
class SkippedSteps:
    """Counts the steps in a row that trained nothing, or left an update out.

    A skipped step is a step: its groups were used up, its number is taken and its version published, with the weights
    of the one before. (The API counts permits by steps; repeating the number would ask for groups that never come.)
    """

    allowed: int
    """Steps in a row that may be so; one more ends the training."""
    files: list[str] = field(default_factory=list)
    """Of those in a row so far. They are in every checkpoint: a trainer that is started again counts on."""

    def skipped(self, file: Path, problem: str) -> None:
        """One more."""
        self.files.append(str(file))
        _LOG.warning("step not trained on, or not on all of it: %s; its groups are kept in %s", problem, file)

    @property
    def too_many(self) -> bool:
        return len(self.files) > self.allowed

    def raise_if_too_many(self) -> None:
        """Raises TrainerError: once a checkpoint covers them, and whenever the training is resumed from that one."""
        if self.too_many:
            raise TrainerError(
                "too_many_skipped_steps",
                f"{len(self.files)} steps in a row were not trained on, or not on all of them. Their groups are kept, "
                f"with the reasons in the .json beside: {', '.join(self.files)}. Look at them; begin another from a "
                "checkpoint (RUN_ID=..., --resume PATH), as with a lower learning_rate or max_grad_norm, or with a "
                "higher max_skipped_steps",
                files=list(self.files),
            )

    def trained(self) -> None:
        """All of a step was finite: the count begins anew."""
        self.files.clear()
