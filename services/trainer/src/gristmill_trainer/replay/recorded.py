"""A run on disk as the program of its training: its checkpoints' records, and the groups of each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill import PolicyVersion, TrajectoryGroup
from gristmill.archive import GroupIndex
from gristmill.archive.drops import read_drops
from gristmill.folders import ORIGIN_FOLDER, RunFolder
from gristmill.internal.settings import parse
from gristmill_trainer.checkpoint.contents import STATE, Checkpoint, verify
from gristmill_trainer.checkpoint.digests import (
    DIGESTS_FILE,
    RECORDED,
    CheckpointRecord,
    TrainerFacts,
    file_digests,
    lineage,
    read_digests,
)
from gristmill_trainer.checkpoint.store import read_progress
from gristmill_trainer.data.checks import Limits
from gristmill_trainer.data.samples import Prepared, to_samples
from gristmill_trainer.errors import CheckpointError, TrainerError
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.replay.untrusted import UntrustedError
from gristmill_trainer.settings import TrainerSettings

_LOADED = ("ref_model", "policy_loss")
"""Settings with which a record loads code or a model."""


class ReplayError(TrainerError):
    """A run cannot be trained again as requested."""


@dataclass(frozen=True)
class Coverage:
    """The steps of a run that its archive has."""

    last: int
    """The last step with a checkpoint's record. Later steps cannot be trained again."""
    missing: Mapping[int, int]
    """Number of groups that are not in the archive, by step; steps with all groups are left out."""
    reasons: Mapping[str, int]
    """Why the archive let groups go, from drops.jsonl, such as "max_bytes"."""

    def report(self) -> str:
        """Returns one line for a person."""
        if not self.missing:
            return f"the archive has the groups of all {self.last} steps"
        steps = sorted(self.missing)
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.reasons.items())) or "not recorded"
        return (
            f"the archive has the groups of {self.last - len(steps)} of {self.last} steps; steps {_ranges(steps)} lack "
            f"{sum(self.missing.values())} groups (reasons: {reasons})"
        )


class RecordedRun:
    """A run that a trainer recorded. The files are not changed."""

    def __init__(
        self,
        folder: RunFolder,
        checkpoints: list[CheckpointRecord],
        groups: GroupIndex,
        models_dir: Path,
        *,
        model: str | None = None,
        trust: bool = False,
    ) -> None:
        """`checkpoints`: a lineage, in order and not empty. `models_dir`, `model`: as in `TrainerFacts.find_source`.
        `trust`: whether paths and models that the files name are used; otherwise UntrustedError is raised."""
        self.folder = folder
        self.trust = trust
        self.checkpoints = checkpoints
        self.groups = groups
        self._models_dir, self._model = models_dir, model
        self._of_step = {step: record for record in checkpoints for step in record.batches}

    @classmethod
    def open(cls, folder: RunFolder, models_dir: Path, *, model: str | None = None, trust: bool = False) -> RecordedRun:
        """Reads the records and indexes the archive. Raises ReplayError if the run has no record of a checkpoint."""
        path = folder.find(DIGESTS_FILE)
        records = [] if path is None else lineage(read_digests(path))
        if not records:
            raise ReplayError(
                "run_not_recorded",
                f"run {folder.run_id} has no record of a checkpoint ({DIGESTS_FILE} in {folder.folders[0]}): it was "
                "trained by an earlier Gristmill, or has no checkpoint yet. Train it again with this version, or wait "
                "for its first checkpoint",
                run=folder.run_id,
            )
        groups = GroupIndex(folder.archive_segments(), records[-1].created_ms)
        return cls(folder, records, groups, models_dir, model=model, trust=trust)

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    @property
    def last_step(self) -> int:
        return self.checkpoints[-1].step

    @property
    def origin(self) -> str | None:
        """The folder of another run's checkpoint from which the run began, or None."""
        first = self.checkpoints[0]
        return first.progress.origin if first.after is None else None

    def record_of(self, step: int) -> CheckpointRecord:
        """Returns the record of the checkpoint that contains `step` and no later checkpoint before it."""
        return self._of_step[step]

    def checkpoint_at(self, step: int) -> CheckpointRecord | None:
        """Returns the record of the checkpoint after `step` steps; None if the trainer wrote no checkpoint there."""
        return next((record for record in self.checkpoints if record.step == step), None)

    def facts(self, step: int) -> TrainerFacts:
        """Returns the inputs of the trainer that took `step`."""
        return self._of_step[step].trainer

    def source(self, step: int) -> ModelSource:
        """Returns the model before any training. Raises ModelError if it is not on this machine."""
        return self.facts(step).find_source(self._model, self._models_dir, trust=self.trust)

    def settings(self, step: int, own: Mapping[str, Any] | None = None) -> TrainerSettings:
        """Returns the settings of the trainer that took `step`, with `own` in place of the recorded ones.

        Raises UntrustedError for a recorded setting that loads code or a model, unless `trust`.
        """
        own = own or {}
        where = f"{DIGESTS_FILE} of run {self.run_id}, step {step}"
        recorded = {name: value for name, value in self.facts(step).settings.items() if name in RECORDED - own.keys()}
        loaded = [name for name in _LOADED if recorded.get(name)]
        if loaded and not self.trust:
            named = ", ".join(f"{name}: {recorded[name]}" for name in loaded)
            raise UntrustedError(
                "untrusted_record",
                f"{where} loads {named}. If you trust whoever wrote the run, add --trust",
                settings=loaded,
            )
        return parse(TrainerSettings, {**recorded, **own}, where)

    def batch(self, step: int) -> list[TrajectoryGroup]:
        """Returns the groups of a step. Raises ReplayError if the archive does not have all of them."""
        ids = self._of_step[step].batches[step]
        missing = [group_id for group_id in ids if group_id not in self.groups]
        if missing:
            later = [record.step for record in self.on_disk() if step <= record.step < self.last_step]
            remedy = (
                f"Start after it, from a checkpoint that is still on disk: --at {later[0]}"
                if later
                else "No checkpoint after it is on disk"
            )
            raise ReplayError(
                "groups_missing",
                f"step {step} of run {self.run_id} trained on {len(ids)} groups, and {len(missing)} of them are not in "
                f"the archive, such as {missing[0]}; {self.coverage().report()}. {remedy}. To keep all groups of the "
                "next run, set API_ARCHIVE_MAX_BYTES above the size of its rollouts before it starts",
                run=self.run_id,
                step=step,
                missing=missing,
            )
        return [self.groups.group(group_id) for group_id in ids]

    def prepare(self, step: int, settings: TrainerSettings, vocabulary: int) -> tuple[list[TrajectoryGroup], Prepared]:
        """Returns the groups and the samples of a step, as the trainer made them under `settings`.

        `vocabulary`: rows of the model's embedding.
        """
        facts = self.facts(step)
        limits = Limits(
            vocabulary=vocabulary,
            seq_len=settings.seq_len or facts.max_model_len,
            policy=PolicyVersion(self._of_step[step].progress.version.incarnation, step - 1),
            max_staleness=facts.max_staleness,
        )
        groups = self.batch(step)
        return groups, to_samples(groups, limits, settings)

    def coverage(self) -> Coverage:
        """Returns how much of the run its archive has."""
        missing = {
            step: count
            for step, record in sorted(self._of_step.items())
            if (count := sum(group_id not in self.groups for group_id in record.batches[step]))
        }
        gone = {
            group_id
            for step in missing
            for group_id in self._of_step[step].batches[step]
            if group_id not in self.groups
        }
        reasons: Counter[str] = Counter()
        for path in self.folder.drops() if gone else ():
            for drop, _ in read_drops(path):
                if drop.what == "let_go" and drop.group_id in gone:
                    reasons[drop.reason or "unknown"] += 1
        return Coverage(self.last_step, missing, reasons)

    def on_disk(self) -> list[CheckpointRecord]:
        """Returns the records whose checkpoint is on disk, in order."""
        return [record for record in self.checkpoints if self._folder_of(record) is not None]

    def load(self, record: CheckpointRecord) -> Checkpoint:
        """Verifies a checkpoint on disk and compares it with its record. Raises CheckpointError."""
        folder = self._folder_of(record)
        assert folder is not None
        verify(folder)
        if file_digests(folder) != record.files:
            raise CheckpointError(
                "checkpoint_mismatch",
                f"{folder} is not the checkpoint of version {record.version} that {DIGESTS_FILE} describes. Move the "
                "folder away to train again from an earlier checkpoint",
                path=folder,
            )
        return Checkpoint(folder, record.progress)

    def load_origin(self) -> Checkpoint:
        """Verifies the checkpoint of another run from which this run began. Raises ReplayError if it is gone.

        A fork has a copy of it, which may be at another path than the recorded one if the run was packed or moved.
        """
        recorded = Path(str(self.origin))
        inside = self.folder.find(f"{ORIGIN_FOLDER}/{recorded.name}")
        path = inside or recorded
        on_disk = ", ".join(str(record.step) for record in self.on_disk()) or "none is"
        if inside is None and not self.trust:
            raise UntrustedError(
                "untrusted_record",
                f"run {self.run_id} began from the checkpoint {path} of another run. If you trust whoever wrote the "
                "run, add --trust; else start from a checkpoint of this run that is on disk: --at STEP "
                f"({on_disk})",
                settings=["origin"],
            )
        if not (path / STATE).is_file():
            raise ReplayError(
                "origin_missing",
                f"run {self.run_id} began from the checkpoint {path} of another run, which does not exist any more. "
                f"Restore that folder, or start from a checkpoint of this run that is on disk: --at STEP ({on_disk})",
                run=self.run_id,
                path=path,
            )
        verify(path)
        checkpoint = Checkpoint(path, read_progress(path))
        if checkpoint.progress.creation == self.checkpoints[0].progress.creation:
            raise ReplayError(
                "origin_missing",
                f"run {self.run_id} began from the checkpoint {path} of an earlier run of this id, and that folder is "
                "now a checkpoint of the run itself; the earlier one may be next to it, as step-N-of-ID. Start from a "
                f"checkpoint of this run that is on disk: --at STEP ({on_disk})",
                run=self.run_id,
                path=path,
            )
        return checkpoint

    def _folder_of(self, record: CheckpointRecord) -> Path | None:
        folder = self.folder.find(f"checkpoints/step-{record.step:06d}")
        if folder is None or not (folder / STATE).is_file():
            return None
        return folder if read_progress(folder) == record.progress else None


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the values that differ, as (then, now), by name."""
    return {name: (then.get(name), now.get(name)) for name in {**then, **now} if then.get(name) != now.get(name)}


def check_step(name: str, step: int, lowest: int, highest: int) -> None:
    """Raises ReplayError if a step on the command line is not in the run."""
    if not lowest <= step <= highest:
        raise ReplayError(
            "step_outside_run",
            f"{name} is {step}; it must be a step from {lowest} to {highest}",
            step=step,
            lowest=lowest,
            highest=highest,
        )


def _ranges(steps: list[int]) -> str:
    """Returns ascending steps as text: "1-12, 15"."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
