"""The loss of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from gristmill import Hyperparameters
from gristmill_trainer.errors import TrainerError
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
        Raises TrainerError if `tokens` lacks a needed input.
        """
        settings = self.settings
        log_weights = log_importance(tokens, settings)
        importance = importance_weights(log_weights, settings)
        if settings.ratio_policy == "rollout":
            tokens = replace(tokens, old_logprobs=tokens.rollout_logprobs)
        policy = self.policy_loss(tokens, importance > 0, self.clip)
        losses = importance * policy.losses
        if self.wants_reference:
            losses = losses + settings.kl_beta * self._kl(tokens, policy.log_ratio)
        if settings.distill_coef > 0 and tokens.teacher_logprobs is not None:
            losses = losses + settings.distill_coef * self._distillation(tokens, tokens.teacher_logprobs)
        loss = (tokens.weights * losses).sum()
        if self.wants_entropy_gradient:
            loss = loss - settings.entropy_coef * self._entropy(tokens)
        return loss, Ratios(
            ratio=policy.log_ratio.detach().exp(),
            clipped_low=policy.clipped_low,
            clipped_high=policy.clipped_high,
            importance=log_weights.exp(),
            capped=out_of_bounds(log_weights, settings),
        )

    def _kl(self, tokens: TrainedTokens, log_ratio: torch.Tensor) -> torch.Tensor:
        if tokens.ref_logprobs is None:
            kl_beta = self.settings.kl_beta
            raise TrainerError(
                "reference_missing",
                f"kl_beta is {kl_beta}, and the batch brings no log-probabilities of the reference model; "
                "load one (wants_reference), or set kl_beta to 0",
                kl_beta=kl_beta,
            )
        kl = KL_ESTIMATORS[self.settings.kl_estimator](tokens.logprobs, tokens.ref_logprobs)
        # DeepSeek-AI 2025 (DeepSeek-V3.2), rho with its gradient: on policy d(rho k3) = -log r d(log pi) = d(k2).
        return log_ratio.exp() * kl if self.settings.kl_bias_correction else kl

    def _distillation(self, tokens: TrainedTokens, teacher_logprobs: torch.Tensor) -> torch.Tensor:
        if tokens.student_logprobs is None:
            raise TrainerError(
                "student_logprobs_missing",
                "the batch brings a teacher's tokens without the policy's log-probabilities of them; "
                "compute them, or set distill_coef to 0",
            )
        return divergence(teacher_logprobs, tokens.student_logprobs, self.settings.distill_divergence)

    def _entropy(self, tokens: TrainedTokens) -> torch.Tensor:
        if tokens.entropy is None:
            entropy_coef = self.settings.entropy_coef
            raise TrainerError(
                "entropy_missing",
                f"entropy_coef is {entropy_coef}, and the batch brings no entropy; "
                "compute it (wants_entropy_gradient), or set entropy_coef to 0",
                entropy_coef=entropy_coef,
            )
        return tokens.entropy_weight * tokens.entropy.sum()
