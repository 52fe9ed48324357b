"""Surrogates: what a step in the policy is worth, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gristmill_trainer.objectives.tokens import TrainedTokens


@dataclass(frozen=True)
class Clip:
    """Where a surrogate stops believing the ratio rho = pi / pi_old."""

    low: float
    """rho below 1 - low counts as that; below 1. cispo has no lower bound."""
    high: float
    """rho above 1 + high counts as that; cispo: rho above high."""


class Stops(NamedTuple):
    """Which tokens' ratios a clip stopped."""

    low: torch.Tensor
    """bool[M]."""
    high: torch.Tensor
    """bool[M]."""


def clipped(log_ratio: torch.Tensor, tokens: TrainedTokens, clip: Clip) -> torch.Tensor:
    """float32[M]: -min(rho A, clip(rho, 1 - low, 1 + high) A).

    Schulman et al. 2017 (PPO), eq. 7; low and high apart (clip-higher): Yu et al. 2025 (DAPO), eq. 10.
    """
    # The minimum is A min(rho, 1 + high) for a positive advantage, and A max(rho, 1 - low) for a negative one. Bounds
    # before exp: a ratio too large for a float32 that the clip discards would leave 0 x inf in the gradient.
    bounded = torch.where(
        tokens.advantages >= 0,
        log_ratio.clamp(max=math.log1p(clip.high)),
        log_ratio.clamp(min=math.log1p(-clip.low)),
    )
    return -tokens.advantages * bounded.exp()


def clipped_stops(log_ratio: torch.Tensor, tokens: TrainedTokens, clip: Clip) -> Stops:
    """Where `clipped` gives no gradient."""
    return Stops(
        low=(log_ratio < math.log1p(-clip.low)) & (tokens.advantages < 0),
        high=(log_ratio > math.log1p(clip.high)) & (tokens.advantages > 0),
    )


def weighted_likelihood(log_ratio: torch.Tensor, tokens: TrainedTokens, clip: Clip) -> torch.Tensor:
    """float32[M]: -sg[min(rho, high)] A log pi; sg holds still.

    No token is left without a gradient, however far it moved. MiniMax 2025 (MiniMax-M1, CISPO), eq. 4 and 5.
    """
    ratio = log_ratio.detach().clamp(max=math.log(clip.high)).exp()
    return -ratio * tokens.advantages * tokens.logprobs


def weighted_likelihood_stops(log_ratio: torch.Tensor, tokens: TrainedTokens, clip: Clip) -> Stops:
    """Where `weighted_likelihood` holds the ratio at its bound."""
    high = (log_ratio > math.log(clip.high)) & (tokens.advantages != 0)
    return Stops(torch.zeros_like(high), high)
