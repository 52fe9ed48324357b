"""What a start of several ranks has learned about micro-batches that do not fit in memory, for the next start.

One process repeats an update that ran out of memory with smaller micro-batches. With several ranks, the other ranks
wait in a collective that the repetition would not answer. The rank then writes `MemoryLimits` into the run's folder and
ends, all ranks start again from the last checkpoint, and no micro-batch exceeds the limits any more.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch

from gristmill.internal.disk import write_file
from gristmill_trainer.disk import writing
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.settings import TrainerSettings

FILE = "memory_limits.json"
_TEXTS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
)
"""Texts of errors that are not a torch.OutOfMemoryError: of the process, the driver, cuBLAS for its workspace, and NCCL
for its buffers."""


class MemoryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The micro-batches that fit in the memory of each rank, as far as is known."""

    token_budget: int | None = None
    """Most tokens of a micro-batch. None: no micro-batch has run out of memory."""
    too_long: int | None = None
    """Tokens of the shortest sequence that did not fit alone. Updates with such a sequence are left out."""
    too_long_to_score: int | None = None
    """The same for log-probabilities without a gradient. Steps that score such a sequence are left out."""

    def __str__(self) -> str:
        budget = f"a micro-batch has at most {self.token_budget} tokens"
        updates = f"updates with a sequence of {self.too_long} tokens or more are left out"
        steps = f"steps that score a sequence of {self.too_long_to_score} tokens or more are left out"
        texts = ((budget, self.token_budget), (updates, self.too_long), (steps, self.too_long_to_score))
        return " and ".join(text for text, value in texts if value)

    @staticmethod
    def read(run_dir: Path, settings: TrainerSettings, ranks: int) -> MemoryLimits:
        """Returns the limits of the run's earlier starts with the same settings and number of ranks.

        Other settings may need less memory, so limits of another start do not count. Raises TrainerError.
        """
        path = run_dir / FILE
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_Found)
        except FileNotFoundError:
            return MemoryLimits()
        except ValueError as error:
            raise TrainerError("memory_limits_unreadable", f"{path}: {error}; delete the file", path=path) from error
        return found.limits if found.of == _fingerprint(settings, ranks) else MemoryLimits()

    def write(self, run_dir: Path, settings: TrainerSettings, ranks: int) -> None:
        """Replaces the limits for the next start. Raises TrainerError for a full disk."""
        with writing(run_dir / FILE):
            run_dir.mkdir(parents=True, exist_ok=True)
            found = _Found(of=_fingerprint(settings, ranks), limits=self)
            write_file(run_dir / FILE, msgspec.json.encode(found), several=True)


def written_limits(runs_dir: Path) -> dict[Path, int]:
    """Returns the files of limits of all runs, with the times at which they were written, in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in runs_dir.glob(f"*/{FILE}")}


class _Found(msgspec.Struct, frozen=True):
    of: str
    """Fingerprint of the start that found the limits."""
    limits: MemoryLimits


class RankOutOfMemoryError(TrainerError):
    """A micro-batch of one of several ranks does not fit in memory. The next start continues within `limits`."""

    def __init__(self, message: str, limits: MemoryLimits) -> None:
        super().__init__("rank_out_of_memory", message, **msgspec.structs.asdict(limits))
        self.limits = limits


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an allocation failed, on a GPU or in the process."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(text in str(error) for text in _TEXTS)


def _fingerprint(settings: TrainerSettings, ranks: int) -> str:
    return hashlib.sha256(f"{ranks} {settings.model_dump_json()}".encode()).hexdigest()
