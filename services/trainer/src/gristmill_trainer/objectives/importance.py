"""Importance correction: the model server's policy, which drew the tokens, differs from the trainer's policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from gristmill_trainer.objectives.segments import sequence_sums
from gristmill_trainer.objectives.tokens import TrainedTokens


@dataclass(frozen=True)
class ImportanceCorrection:
    """Weights w = pi_old / mu on the surrogate; mu is the policy that drew the tokens.

    Token level: w = exp(log pi_old - log mu). Sequence level: each trained token has exp of the sum of these
    differences over its sequence. Truncated importance sampling: Yao et al. 2025; masked: Liu, Li et al. 2025.
    """

    how: Literal["truncate", "mask", "none"]
    """truncate: min(w, cap). mask: w, or 0 if w is above the cap. none: 1."""
    level: Literal["token", "sequence"]
    cap: float

    def log_weights(self, tokens: TrainedTokens) -> torch.Tensor:
        """Returns float32[M]: log w, before the cap."""
        log_weights = tokens.old_logprobs - tokens.rollout_logprobs
        return sequence_sums(log_weights, tokens) if self.level == "sequence" else log_weights

    def weights(self, tokens: TrainedTokens) -> torch.Tensor:
        """Returns float32[M]: the weights after the cap, without gradient."""
        if self.how == "none":
            return torch.ones_like(tokens.old_logprobs)
        log_weights = self.log_weights(tokens)
        weights = log_weights.clamp(max=math.log(self.cap)).exp()
        if self.how == "mask":
            weights = weights.masked_fill(log_weights > math.log(self.cap), 0.0)
        return weights
