"""The optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gristmill.settings import Settings


class OptimizerSettings(Settings):
    """AdamW and its learning rate."""

    learning_rate: float = Field(default=1e-6, ge=0)
    """AdamW's learning rate, at its highest."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes after the warm-up: it stays, or falls to 0 at training_steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to learning_rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's beta 1."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's beta 2."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit keeps its state in 8 bits; CUDA and the bitsandbytes package only."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters on all linear layers but the head; 0 trains all weights. Needs the peft package."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """LoRA's scale: alpha / rank."""
