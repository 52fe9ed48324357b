"""What is in a checkpoint.

step-000020/
  config.json, model.safetensors, ...   the model, as Hugging Face's folders are
  optimizer.pt                          the learner's other state: optimizer, schedule
  random.pt                             random number generators
  trainer_state.json                    `Progress`
  manifest.json                         SHA-256 of every file above
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gristmill import PolicyVersion

OPTIMIZER = "optimizer.pt"
RANDOM = "random.pt"
STATE = "trainer_state.json"


@dataclass(frozen=True)
class Progress:
    """Where the training stands."""

    step: int
    """Optimizer steps done, skipped ones included."""
    version: PolicyVersion
    """Of these weights. Versions only go forward, so the newest checkpoint of a run is that of the highest."""
    last_batch: str | None = None
    """Id of the batch trained last."""
    covered: list[str] = field(default_factory=list)
    """Ids of the groups trained since the checkpoint before: the run's next trainer settles them."""
    skipped: list[str] = field(default_factory=list)
    """Files of the steps up to this one that were skipped in a row (aside.py)."""
    origin: str | None = None
    """The checkpoint folder that `resume` named when this training began."""
    creation: str | None = None
    """`RunRecord.creation` of the run. Group ids start again when a run is deleted and created again, so its steps and
    its groups mean nothing in another creation. None: written by a trainer that did not record it."""


@dataclass(frozen=True)
class Checkpoint:
    """One folder whose files were all there and as they were written."""

    path: Path
    progress: Progress

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def covered(self) -> list[str]:
        return self.progress.covered


class Resumable(Protocol):
    """What learns: one process with the whole model, or one of several that each hold a part."""

    def save_model(self, folder: Path) -> None:
        """Write a Hugging Face model folder, whole, whoever holds the parts."""

    def state(self) -> dict[str, Any]:
        """The rest, made of dicts and lists of tensors, numbers and words; "schedule" is the learning rate's."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave, less "schedule" where that begins anew. (The folder itself gives the model.)"""
