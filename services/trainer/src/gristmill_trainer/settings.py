"""The trainer's settings: trainer.yaml, overridden by the run's `trainer:` block, overridden by the command line.

A run may set hyperparameters only (`gristmill.hyperparameters`). The settings of this file say where things are and
what the trainer's machine may do. They come from trainer.yaml and the command line.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gristmill import Hyperparameters

_MAY_CHANGE = frozenset({"token_budget", "packing", "gradient_checkpointing", "compile"})
"""Hyperparameters that a resumed training may change: they affect memory and speed."""


class TrainerSettings(Hyperparameters):
    """The settings of one training."""

    model_name: str | None = None
    """Model to train: a hub id, a folder, or the name of the served model. Default: the model that the server runs."""
    rollout_server_url: str | None = None
    """Trajectory API. Default: GRISTMILL_API_URL, else http://127.0.0.1:8000."""
    base_url: str | None = None
    """Model server that receives the weights, with or without /v1; several servers with commas between them. Default:
    GRISTMILL_MODEL_URL, else http://127.0.0.1:9001."""
    atropos_run: str | None = None
    """Train on the run that Atropos' environments feed, by its id: the API's ATROPOS_RUN, usually `default`. Default:
    the run that an environment of this stack opens."""

    publisher: Literal["filesystem", "none"] = "filesystem"
    """How weights reach the model server. none: for a server whose weights may not be updated."""
    ref_model: str | None = None
    """Reference model of the KL divergence: a hub id or a folder. Default: the run's model before any training."""
    resume: str = "auto"
    """auto: from the run's newest checkpoint, if there is one. never: from the first weights; an error if the run has
    checkpoints. A checkpoint's folder: from that checkpoint."""
    checkpoints_kept: int = Field(default=2, ge=1)
    """How many checkpoints stay on disk."""
    push_to_hub: str | None = None
    """Hub repository that receives the finished model, as owner/name. Needs a hub token that may write."""
    stop_grace_seconds: float = Field(default=50.0, ge=0)
    """Seconds after SIGTERM that the current step and a checkpoint may take. Set it about ten seconds below the time
    after which the trainer is killed (Compose 60, Kubernetes 30). Under torchrun the value is its
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT minus ten."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA if a device is available."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak that MFU is a share of. Default: the device's peak, if it is known."""

    use_wandb: bool = False
    """Send the metrics to Weights & Biases as well; WANDB_MODE=offline keeps them on this machine."""
    wandb_project: str | None = None
    """W&B project. Default: gristmill."""
    wandb_name: str | None = None
    """W&B run name. Default: the run id."""
    on_step: str | None = None
    """A function that is called after every step, as path/to/file.py:function or package.module:function, with a
    gristmill_trainer.hooks.StepEvent. It is not called after the step in which the trainer is asked to stop."""

    def record(self) -> dict[str, Any]:
        """The trainer's half of the run record: the settings that must not change during the run."""
        fixed = {*Hyperparameters.model_fields, "publisher", "ref_model"} - _MAY_CHANGE
        return self.model_dump(include=fixed)
