"""The loss of a micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from gristmill import Hyperparameters
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.objectives.distillation import divergence
from gristmill_trainer.objectives.importance import ImportanceCorrection
from gristmill_trainer.objectives.kl import ESTIMATORS
from gristmill_trainer.objectives.segments import sequence_means
from gristmill_trainer.objectives.surrogate import Clip
from gristmill_trainer.objectives.table import RECIPES, Level, Surrogate
from gristmill_trainer.objectives.tokens import TrainedTokens


class Measured(NamedTuple):
    """An objective's ratios and weights, and the effect of its bounds: [M] each."""

    ratio: torch.Tensor
    """float32: pi / pi_old of the token or its sequence."""
    stopped_low: torch.Tensor
    """bool: the lower clip bounded the ratio."""
    stopped_high: torch.Tensor
    importance: torch.Tensor
    """float32: pi_old / mu of the token or its sequence, before the cap."""
    capped: torch.Tensor
    """bool: the weight is above the cap."""


@dataclass(frozen=True)
class Objective:
    """The loss, for tokens i with weights a_i (`token_weights`), w_i (importance) and e (entropy):

        sum_i a_i (w_i l_i + kl_beta KL_i + distill_coef D_i) - entropy_coef e sum_i H_i

    l: the surrogate. docs/objectives.md has the formulas and their sources.
    """

    level: Level
    surrogate: Surrogate
    clip: Clip
    importance: ImportanceCorrection
    kl_beta: float
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_bias_correction: bool
    entropy_coef: float
    distill_coef: float
    distill_divergence: Literal["forward", "reverse"]

    @classmethod
    def of(cls, settings: Hyperparameters) -> Objective:
        recipe = RECIPES[settings.objective]
        low, high = settings.clip_epsilon, settings.clip_epsilon_high
        if high is None:
            high = low if low is not None and recipe.high_follows_low else recipe.clip.high
        return cls(
            level=recipe.level,
            surrogate=recipe.surrogate,
            clip=Clip(recipe.clip.low if low is None else low, high),
            importance=ImportanceCorrection(
                settings.importance_correction, settings.importance_level, settings.importance_cap
            ),
            kl_beta=settings.kl_beta,
            kl_estimator=settings.kl_estimator,
            kl_bias_correction=settings.kl_bias_correction,
            entropy_coef=settings.entropy_coef,
            distill_coef=settings.distill_coef,
            distill_divergence=settings.distill_divergence,
        )

    @property
    def wants_entropy_gradient(self) -> bool:
        return self.entropy_coef > 0

    @property
    def wants_reference(self) -> bool:
        return self.kl_beta > 0

    def log_ratio(self, tokens: TrainedTokens) -> torch.Tensor:
        """Returns float32[M]: log rho with its gradient. At sequence level, each token has the mean of its sequence.

        Zheng et al. 2025 (GSPO), eq. 7.
        """
        log_ratio = tokens.logprobs - tokens.old_logprobs
        return log_ratio if self.level is Level.TOKEN else sequence_means(log_ratio, tokens)

    def loss(self, tokens: TrainedTokens) -> torch.Tensor:
        """Returns float32[]: this micro-batch's part of the update's loss, a sum over micro-batches and ranks.

        A sequence must not be split between micro-batches. Raises TrainerError if `tokens` lacks a needed input.
        """
        importance = self.importance.weights(tokens)
        # The ratio of a masked token may be infinite, and 0 x inf is NaN.
        log_ratio = self.log_ratio(tokens).where(importance > 0, 0.0)
        losses = importance * self.surrogate.loss(log_ratio, tokens, self.clip)
        if self.wants_reference:
            losses = losses + self.kl_beta * self._kl(tokens)
        if self.distill_coef > 0 and tokens.teacher_logprobs is not None:
            losses = losses + self.distill_coef * self._distillation(tokens)
        loss = (tokens.weights * losses).sum()
        if self.wants_entropy_gradient:
            loss = loss - self.entropy_coef * self._entropy(tokens)
        return loss

    def measured(self, tokens: TrainedTokens) -> Measured:
        """Returns each token's ratio and weight, and the effect of the bounds, without gradient."""
        log_ratio = self.log_ratio(tokens).detach()
        log_weights = self.importance.log_weights(tokens)
        stops = self.surrogate.stops(log_ratio, tokens, self.clip)
        return Measured(
            ratio=log_ratio.exp(),
            stopped_low=stops.low,
            stopped_high=stops.high,
            importance=log_weights.exp(),
            capped=log_weights > math.log(self.importance.cap),
        )

    def _kl(self, tokens: TrainedTokens) -> torch.Tensor:
        if tokens.ref_logprobs is None:
            raise TrainerError(
                "reference_missing",
                f"kl_beta is {self.kl_beta}, and the batch brings no log-probabilities of the reference model; "
                "load one (wants_reference), or set kl_beta to 0",
                kl_beta=self.kl_beta,
            )
        kl = ESTIMATORS[self.kl_estimator](tokens.logprobs, tokens.ref_logprobs)
        # DeepSeek-AI 2025 (DeepSeek-V3.2), rho with its gradient: on policy d(rho k3) = -log r d(log pi) = d(k2).
        return self.log_ratio(tokens).exp() * kl if self.kl_bias_correction else kl

    def _distillation(self, tokens: TrainedTokens) -> torch.Tensor:
        if tokens.teacher_logprobs is None or tokens.student_logprobs is None:
            raise TrainerError(
                "student_logprobs_missing",
                "the batch brings a teacher's tokens without the policy's log-probabilities of them; "
                "compute them, or set distill_coef to 0",
            )
        return divergence(tokens.teacher_logprobs, tokens.student_logprobs, self.distill_divergence)

    def _entropy(self, tokens: TrainedTokens) -> torch.Tensor:
        if tokens.entropy is None:
            raise TrainerError(
                "entropy_missing",
                f"entropy_coef is {self.entropy_coef}, and the batch brings no entropy; "
                "compute it (wants_entropy_gradient), or set entropy_coef to 0",
                entropy_coef=self.entropy_coef,
            )
        return tokens.entropy_weight * tokens.entropy.sum()
