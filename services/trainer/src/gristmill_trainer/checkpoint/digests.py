"""The digests of every checkpoint of a run, with everything that determined its bytes: `<run>/digests.jsonl`.

Old checkpoints are removed, and their rows stay. A row names the groups of each step since the checkpoint before it, so
the rows and the run's archive are together the program of the training: `gristmill retrain` executes it again.

The rows of a run are a tree. A trainer that was killed may have written rows after the checkpoint from which the next
trainer continued, and a row names the checkpoint that it follows. The newest version and the rows that it follows are
the run's training.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from gristmill import Hyperparameters, Manifest
from gristmill.internal import foreign
from gristmill.internal.lines import JsonlWriter, whole_lines
from gristmill_trainer.checkpoint.contents import Progress, read_manifest
from gristmill_trainer.disk import writing
from gristmill_trainer.errors import CheckpointError, ModelError
from gristmill_trainer.learner_factory import LearnerPlan
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.settings import OF_TRAINING

DIGESTS_FILE: Final = "digests.jsonl"
RECORDED = frozenset({*Hyperparameters.model_fields, *OF_TRAINING, "device"})
"""The settings with which a retraining begins. No other setting is in the file, so it has no secrets."""


class TrainerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a trainer, except the groups."""

    settings: dict[str, Any]
    model: str
    """Folder or hub id of the weights before any training."""
    model_sha256: str | None
    """`Manifest.sha256` of the model; None if the trainer had no manifest of it."""
    max_model_len: int
    """Tokens: the longest sequence that the model server takes."""
    max_staleness: int | None
    """The run's staleness bound in steps; None: no bound."""
    max_completion_length: int | None
    """Tokens: the environment's `max_tokens`; None if unknown."""
    software: dict[str, str]
    """Version of each package by name."""
    hardware: dict[str, str]

    @classmethod
    def of(cls, plan: LearnerPlan, device: torch.device, *, ranks: int, max_staleness: int | None) -> TrainerFacts:
        return cls(
            settings=plan.settings.model_dump(include=set(RECORDED)),
            model=plan.source.weights,
            model_sha256=plan.source.sha256,
            max_model_len=plan.source.max_model_len,
            max_staleness=max_staleness,
            max_completion_length=plan.max_completion_length,
            software=software(lora=plan.settings.lora_rank > 0),
            hardware=hardware(device, ranks),
        )

    def find_source(self, model: str | None, models_dir: Path, *, trust: bool) -> ModelSource:
        """Returns the model before any training. Raises ModelError if it is not on this machine.

        `model`: a folder or hub id that the user names. Without it: the model of this machine's manifest if the
        manifest has the recorded digest, or with `trust` the recorded folder or hub id.
        """
        manifest = Manifest.find(models_dir)
        weights = model
        if weights is None and manifest is not None and manifest.sha256 == self.model_sha256:
            weights = manifest.weights_path
        if weights is None and trust and (self.model_sha256 is None or Path(self.model).is_dir()):
            weights = self.model
        if weights is None:
            raise ModelError(
                "model_missing",
                f"the run began from the model {self.model} (SHA-256 {(self.model_sha256 or '')[:12]}), which the "
                "model server of this machine did not load. Name its folder or hub id with --model; --trust uses the "
                "recorded name",
                model=self.model,
            )
        same = manifest is not None and manifest.weights_path == weights
        tokenizer = manifest.tokenizer_path if manifest is not None and same else weights
        sha256 = manifest.sha256 if manifest is not None and same else None if model else self.model_sha256
        return ModelSource(weights, tokenizer, None, self.max_model_len, sha256=sha256)


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row: a checkpoint."""

    progress: Progress
    files: dict[str, str]
    """SHA-256 of each file by its path in the checkpoint's folder."""
    batches: dict[int, list[str]]
    """Ids of the groups of each step after the checkpoint that this one follows, in the order of the lease. A skipped
    step has its groups too."""
    after: str | None
    """Policy version of the checkpoint that this one follows. None: the model's first weights, or the checkpoint of
    another run that `progress.origin` names."""
    created_ms: int
    """Time of the run's creation, as the archive's segments have it."""
    trainer: TrainerFacts

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def version(self) -> str:
        return str(self.progress.version)


class DigestWriter:
    """Writes the rows of one trainer. Only rank 0 has one."""

    def __init__(self, run_dir: Path, trainer: TrainerFacts, created_at: float, after: str | None) -> None:
        """`created_at`: of the run, Unix time in seconds. `after`: version of the own checkpoint that the trainer
        resumed from."""
        self._path = run_dir / DIGESTS_FILE
        self._writer = JsonlWriter(self._path)
        self._trainer = trainer
        self._created_ms = round(created_at * 1000)
        self._after = after
        self._batches: dict[int, list[str]] = {}

    def trained(self, step: int, group_ids: Sequence[str]) -> None:
        """Records the groups of a step. The next checkpoint of this step or a later one contains the step."""
        self._batches[step] = list(group_ids)

    def append(self, folder: Path, progress: Progress) -> None:
        """Writes the row of a checkpoint. The row is on disk when this returns. Raises CheckpointError.

        Another thread may call `trained` meanwhile.

        `folder`: a complete checkpoint. The checkpoint gets its name after this call: every checkpoint has a row, and
        a row without a checkpoint is followed by no other row.
        """
        if str(progress.version) == self._after:  # The same checkpoint again, because its ack was refused.
            return
        # The trainer may be some steps ahead of a checkpoint that a thread writes.
        batches = {step: groups for step, groups in list(self._batches.items()) if step <= progress.step}
        record = CheckpointRecord(
            progress=progress,
            files=file_digests(folder),
            batches=batches,
            after=self._after,
            created_ms=self._created_ms,
            trainer=self._trainer,
        )
        with writing(self._path, CheckpointError):
            self._writer.append(record)
        self._after = record.version
        for step in batches:
            del self._batches[step]

    def close(self) -> None:
        self._writer.close()


def file_digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file of a checkpoint, as its manifest has it. Raises CheckpointError."""
    return {name: file.sha256 for name, file in read_manifest(folder).files.items()}


def read_digests(path: Path) -> list[CheckpointRecord]:
    """Returns the rows of a digests.jsonl, without a torn last line. Raises CheckpointError and OSError."""
    try:
        with foreign.open_file(path.parent.resolve() / path.name) as file:
            return [msgspec.json.decode(line, type=CheckpointRecord) for _, line in whole_lines(file)]
    except (foreign.ForeignFileError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "digests_unreadable",
            f"{path} is not readable ({error}). A newer Gristmill may have written it: install its version",
            path=path,
        ) from error


def lineage(records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
    """Returns the checkpoints of the newest training among `records`, in order: the newest version, and all that it
    follows. Records of an earlier run of the same id, and of checkpoints that were given up, are left out.

    Raises CheckpointError if one of them has no record.
    """
    if not records:
        return []
    creation = records[-1].progress.creation
    by_version = {record.version: record for record in records if record.progress.creation == creation}
    newest: CheckpointRecord | None = max(by_version.values(), key=lambda record: record.progress.version)
    ancestors: list[CheckpointRecord] = []
    while newest is not None:
        ancestors.append(newest)
        if newest.after is not None and newest.after not in by_version:
            raise CheckpointError(
                "digests_unreadable",
                f"{DIGESTS_FILE} has no row of version {newest.after}, after which {newest.version} was trained: the "
                "row was damaged. The run cannot be retrained; it can continue with --resume from its checkpoints",
                path=DIGESTS_FILE,
            )
        newest = None if newest.after is None else by_version[newest.after]
    return ancestors[::-1]


def software(*, lora: bool) -> dict[str, str]:
    """Returns the versions of Python and of the packages that compute a step."""
    names = ("gristmill-trainer", "torch", "transformers", "numpy", *(("peft",) if lora else ()))
    return {"python": platform.python_version(), **{name: version_of(name) for name in names}}


def hardware(device: torch.device, ranks: int) -> dict[str, str]:
    """Returns the properties of the machine that change rounding: the processor, its instructions, and the number of
    threads and processes among which a sum is divided."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "ranks": str(ranks),
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
