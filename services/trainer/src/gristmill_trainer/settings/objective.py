"""The objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gristmill.settings import Settings

ObjectiveName = Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "gspo"]


class ObjectiveSettings(Settings):
    """The loss and what it holds against the policy."""

    objective: ObjectiveName = "dapo"
    """Surrogate and aggregation over tokens: grpo, dapo, bnpo, dr_grpo, cispo, gspo. See docs/trainer.md."""
    clip_epsilon: float | None = Field(default=None, gt=0)
    """Lower clip of the policy ratio: 1 - clip_epsilon. Default: 0.2; gspo 0.0003."""
    clip_epsilon_high: float | None = Field(default=None, gt=0)
    """Upper clip of the policy ratio: 1 + clip_epsilon_high; cispo: its largest ratio. Default: clip_epsilon; dapo
    0.28, gspo 0.0004, cispo 5."""
    max_completion_length: int | None = Field(default=None, ge=1)
    """What dr_grpo divides by. Default: the run's max_tokens."""
    importance_correction: Literal["truncate", "mask", "none"] = "truncate"
    """What is done about the rollout policy being another than the trainer's: weights above importance_cap are cut to
    it, or their tokens left out, or no weights at all."""
    importance_level: Literal["token", "sequence"] = "token"
    """Whether a token's weight is its own or its whole sequence's."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Cap C of the importance weight that corrects for the rollout policy."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference model; 0 loads none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence a token."""
    kl_bias_correction: bool = False
    """Multiply a token's KL term by its policy ratio: with k3 its gradient is then that of the divergence, unbiased."""
    ref_model: str | None = None
    """Reference model: a hub id or a folder. Default: the run's model as it was before any training."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    distill_coef: float = Field(default=1.0, ge=0)
    """Weight of the distillation loss, in groups that bring a teacher's tokens."""
    distill_divergence: Literal["forward", "reverse"] = "forward"
    """forward: KL(teacher || policy); reverse: KL(policy || teacher)."""

    @model_validator(mode="after")
    def _clip_below_one(self) -> ObjectiveSettings:
        if self.clip_epsilon is not None and self.clip_epsilon >= 1:
            raise ValueError("clip_epsilon must be below 1: the lower clip is 1 - clip_epsilon")
        return self
