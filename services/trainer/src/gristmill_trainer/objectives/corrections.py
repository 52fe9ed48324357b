"""Importance correction: the model server's policy, which drew the tokens, differs from the trainer's policy.

The policy loss of each token has the weight w = pi_old / mu; mu is the policy that drew the tokens.
Truncated importance sampling: Yao et al. 2025; masked: Liu, Li et al. 2025.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from gristmill_trainer.objectives.losses import TrainedTokens, sequence_sums


def log_importance(tokens: TrainedTokens, level: Literal["token", "sequence"]) -> torch.Tensor:
    """Returns float32[M]: log w, before the cap.

    Token level: log pi_old - log mu. Sequence level: each trained token has the sum of these differences over its
    sequence.
    """
    log_weights = tokens.old_logprobs - tokens.rollout_logprobs
    return sequence_sums(log_weights, tokens) if level == "sequence" else log_weights


def importance_weights(log_weights: torch.Tensor, how: Literal["truncate", "mask", "none"], cap: float) -> torch.Tensor:
    """Returns float32[M]: the weights after the cap, without gradient.

    truncate: min(w, cap). mask: w, or 0 if w is above the cap. none: 1.
    """
    if how == "none":
        return torch.ones_like(log_weights)
    weights = log_weights.clamp(max=math.log(cap)).exp()
    return weights.masked_fill(log_weights > math.log(cap), 0.0) if how == "mask" else weights
