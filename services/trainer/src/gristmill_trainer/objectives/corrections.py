"""Importance correction: the model server's policy, which drew the tokens, differs from the trainer's policy.

The policy loss of each token has the weight w = pi_old / mu; mu is the policy that drew the tokens.
Truncated importance sampling: Yao et al. 2025. Masked: Liu, Li et al. 2025; on both sides: Ling Team 2025 (IcePop).
"""

from __future__ import annotations

import math

import torch

from gristmill import Hyperparameters
from gristmill_trainer.objectives.losses import TrainedTokens, sequence_means, sequence_sums


def log_importance(tokens: TrainedTokens, settings: Hyperparameters) -> torch.Tensor:
    """Returns float32[M]: log w, before the bounds.

    Token level: log pi_old - log mu. Sequence level: each trained token has the sum of these differences over its
    sequence; geometric: their mean.
    """
    log_weights = tokens.old_logprobs - tokens.rollout_logprobs
    match settings.importance_level:
        case "sequence":
            return sequence_sums(log_weights, tokens)
        case "geometric":
            return sequence_means(log_weights, tokens)
        case _:
            return log_weights


def out_of_bounds(log_weights: torch.Tensor, settings: Hyperparameters) -> torch.Tensor:
    """Returns bool[M]: the weight is above importance_cap or below importance_floor."""
    low, high = _log_bounds(settings)
    return (log_weights > high) | (log_weights < low)


def importance_weights(log_weights: torch.Tensor, settings: Hyperparameters) -> torch.Tensor:
    """Returns float32[M]: the weights within the bounds, without gradient.

    truncate: w, or the nearest bound. mask: w, or 0 if w is out of the bounds. none: 1. The ratio to the rollout policy
    is its own correction, so the weights are then 1.
    """
    if settings.importance_correction == "none" or settings.ratio_policy == "rollout":
        return torch.ones_like(log_weights)
    low, high = _log_bounds(settings)
    weights = log_weights.clamp(min=low, max=high).exp()
    if settings.importance_correction == "mask":
        return weights.masked_fill(out_of_bounds(log_weights, settings), 0.0)
    return weights


def _log_bounds(settings: Hyperparameters) -> tuple[float, float]:
    floor = settings.importance_floor
    return (math.log(floor) if floor > 0 else -math.inf), math.log(settings.importance_cap)
