"""The trainer's settings: trainer.yaml < the run's `trainer:` block < the command line."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gristmill.settings import Settings


class TrainerSettings(Settings):
    """What one training does."""

    model_name: str | None = None
    """Model to train: a hub id, a folder, or the name of the served model. Default: what the model server runs."""
    rollout_server_url: str | None = None
    """Trajectory API. Default: GRISTMILL_API_URL, else http://127.0.0.1:8000."""
    base_url: str | None = None
    """Model server that receives the weights, with or without /v1. Default: GRISTMILL_MODEL_URL, else http://127.0.0.1:9001."""
    training_steps: int = Field(default=20, ge=1)
    """Optimizer steps; the run is finished after them."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences a micro-batch. A step takes batch_size x gradient_accumulation_steps sequences."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches an optimizer step."""
    seq_len: int | None = Field(default=None, ge=2)
    """Longest sequence, in tokens; what is beyond is not trained on. Default: the server's longest."""
    learning_rate: float = Field(default=1e-6, ge=0)
    """AdamW's learning rate, constant."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's beta 1."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's beta 2."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
    clip_epsilon: float = Field(default=0.2, gt=0)
    """Lower clip of the policy ratio: 1 - clip_epsilon."""
    clip_epsilon_high: float | None = Field(default=None, gt=0)
    """Upper clip of the policy ratio: 1 + clip_epsilon_high. Default: clip_epsilon."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Cap C of the truncated importance weight that corrects for the rollout policy."""
    max_staleness: int = Field(default=0, ge=0)
    """How many steps the environment may run ahead of the trainer. 0 is synchronous."""
    checkpoint_interval: int = Field(default=5, ge=1)
    """Steps between durable checkpoints; a kill costs at most this many steps."""
    checkpoints_kept: int = Field(default=2, ge=1)
    """How many checkpoints stay on disk."""
    publisher: Literal["filesystem", "none"] = "filesystem"
    """How weights reach the model server; "none" for a server that may not be updated."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is one."""
    seed: int = 0
    """Seed of the trainer's random numbers."""

    @model_validator(mode="after")
    def _high_not_below_low(self) -> TrainerSettings:
        if self.clip_epsilon >= 1:
            raise ValueError("clip_epsilon must be below 1: the lower clip is 1 - clip_epsilon")
        return self

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    def record(self) -> dict[str, Any]:
        """The trainer's half of the run record: what must not change while the run lasts."""
        return self.model_dump(exclude={"device", "model_name", "rollout_server_url", "base_url"})
