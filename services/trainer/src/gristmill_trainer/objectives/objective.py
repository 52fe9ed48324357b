"""The loss of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from gristmill import Hyperparameters
from gristmill_trainer.objectives.corrections import importance_weights, log_importance, out_of_bounds
from gristmill_trainer.objectives.losses import POLICY_LOSSES, Clip, PolicyLoss, TrainedTokens, clip_of
from gristmill_trainer.objectives.penalties import KL_ESTIMATORS, divergence


class Ratios(NamedTuple):
    """The ratios and weights of the tokens, and the effect of their bounds, without gradient: [M] each."""

    ratio: torch.Tensor
    """float32: pi / pi_old of the token or its sequence."""
    clipped_low: torch.Tensor
    """bool: the lower clip bounded the ratio."""
    clipped_high: torch.Tensor
    importance: torch.Tensor
    """float32: pi_old / mu of the token or its sequence, before the bounds."""
    capped: torch.Tensor
    """bool: the weight is out of the bounds."""


@dataclass(frozen=True)
class Objective:
    """The loss, for tokens i with weights a_i (`token_weights`), w_i (importance) and e (entropy):

        sum_i a_i (w_i l_i + kl_beta KL_i + distill_coef D_i) - entropy_coef e sum_i H_i

    l: the policy loss. docs/trainer.md has the formulas and their sources.
    """

    settings: Hyperparameters
    policy_loss: PolicyLoss
    clip: Clip

    @classmethod
    def of(cls, settings: Hyperparameters, policy_loss: PolicyLoss | None = None) -> Objective:
        """`policy_loss`: the user's own, in place of the objective's."""
        return cls(settings, policy_loss or POLICY_LOSSES[settings.objective], clip_of(settings))

    @property
    def wants_entropy_gradient(self) -> bool:
        return self.settings.entropy_coef > 0

    @property
    def wants_reference(self) -> bool:
        return self.settings.kl_beta > 0

    def loss(self, tokens: TrainedTokens) -> tuple[torch.Tensor, Ratios]:
        """Returns float32[], this micro-batch's part of the update's loss, and the ratios of its tokens.

        The update's loss is the sum over micro-batches and ranks. If the settings have `joins_branches`, a sequence
        must not be split between micro-batches.
        """
        settings = self.settings
        log_weights = log_importance(tokens, settings)
        importance = importance_weights(log_weights, settings)
        if settings.ratio_policy == "rollout":
            tokens = replace(tokens, old_logprobs=tokens.rollout_logprobs)
        policy = self.policy_loss(tokens, importance > 0, self.clip)
        losses = importance * policy.losses
        if self.wants_reference:
            assert tokens.ref_logprobs is not None
            kl = KL_ESTIMATORS[settings.kl_estimator](tokens.logprobs, tokens.ref_logprobs)
            if settings.kl_bias_correction:
                # DeepSeek-AI 2025 (DeepSeek-V3.2). On policy d(rho k3) = -log r d(log pi) = d(k2).
                kl = policy.log_ratio.exp() * kl
            losses = losses + settings.kl_beta * kl
        if settings.distill_coef > 0 and tokens.teacher_logprobs is not None:
            assert tokens.student_logprobs is not None
            distance = divergence(tokens.teacher_logprobs, tokens.student_logprobs, settings.distill_divergence)
            losses = losses + settings.distill_coef * distance
        loss = (tokens.weights * losses).sum()
        if self.wants_entropy_gradient:
            assert tokens.entropy is not None
            loss = loss - settings.entropy_coef * (tokens.entropy_weight * tokens.entropy.sum())
        return loss, Ratios(
            ratio=policy.log_ratio.detach().exp(),
            clipped_low=policy.clipped_low,
            clipped_high=policy.clipped_high,
            importance=log_weights.exp(),
            capped=out_of_bounds(log_weights, settings),
        )
