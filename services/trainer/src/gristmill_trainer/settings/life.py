"""How a run goes on and ends."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gristmill.settings import Settings


class LifeSettings(Settings):
    """Steps, checkpoints, publications."""

    training_steps: int = Field(default=20, ge=1)
    """Optimizer steps; the run is finished after them."""
    max_staleness: int = Field(default=0, ge=0)
    """How many steps the environment may run ahead of the trainer. 0 is synchronous."""
    checkpoint_interval: int = Field(default=5, ge=1)
    """Steps between durable checkpoints; a kill costs at most this many steps."""
    checkpoints_kept: int = Field(default=2, ge=1)
    """How many checkpoints stay on disk."""
    resume: str = "auto"
    """auto: from the run's newest checkpoint, if there is one; never: from the first weights, and an error where the
    run has checkpoints; a checkpoint's folder: from that one."""
    stop_grace_seconds: float = Field(default=50.0, ge=0)
    """Seconds from SIGTERM to the end that a step and a checkpoint may take; some ten less than what stops the trainer
    leaves it (Compose 60, Kubernetes 30). Under torchrun: its TORCH_ELASTIC_SHUTDOWN_TIMEOUT, less ten."""
    max_skipped_steps: int = Field(default=3, ge=0)
    """Steps in a row that may train nothing, or leave out an update whose loss or gradient is not finite; one more ends
    the training."""
    publisher: Literal["filesystem", "none"] = "filesystem"
    """How weights reach the model server; "none" for a server that may not be updated."""
    seed: int = 0
    """Seed of the trainer's random numbers."""
    push_to_hub: str | None = None
    """Hub repository that gets the finished model, as owner/name; needs HF_TOKEN."""
