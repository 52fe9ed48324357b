"""The contents of a checkpoint.

step-000020/
  config.json, model.safetensors, ...   the model in Hugging Face's format
  optimizer.pt                          states of the optimizer and the schedule
  random.pt                             states of the random number generators
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
    creation: str | None = None
    """`RunRecord.creation` of the run. When a run is deleted and created again, group ids restart, so steps and groups
    are only valid in their own creation. None: written by a trainer that did not record the creation."""


@dataclass(frozen=True)
class Checkpoint:
    """One folder whose files passed verification."""

    path: Path
    progress: Progress

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def covered(self) -> list[str]:
        return self.progress.covered


class Resumable(Protocol):
    """A learner with a state to save: one process with the whole model, or one of several with parts of it."""

    def save_model(self, folder: Path) -> None:
        """Writes the whole model as a Hugging Face folder, even if several processes hold its parts."""

    def state(self) -> dict[str, Any]:
        """Returns the other state as dicts and lists of tensors, numbers and strings. "schedule": learning rate."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores a result of `state`, without "schedule" if the schedule restarts. The model is loaded separately."""
