"""Surrogates: losses per token for a policy update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gristmill_trainer.objectives.tokens import TrainedTokens


@dataclass(frozen=True)
class Clip:
    """A surrogate's bounds on the ratio rho = pi / pi_old."""

    low: float
    """rho below 1 - low counts as 1 - low. `low` is below 1. cispo has no lower bound."""
    high: float
    """rho above 1 + high counts as 1 + high. cispo: rho above high counts as high."""


class Stops(NamedTuple):
    """The tokens whose ratio a clip bounded."""

    low: torch.Tensor
    """bool[M]."""
    high: torch.Tensor
    """bool[M]."""


def clipped(log_ratio: torch.Tensor, tokens: TrainedTokens, clip: Clip) -> torch.Tensor:
    """Returns float32[M]: -min(rho A, clip(rho, 1 - low, 1 + high) A).

    Schulman et al. 2017 (PPO), eq. 7; separate low and high (clip-higher): Yu et al. 2025 (DAPO), eq. 10.
    """
    # The minimum is A min(rho, 1 + high) for a positive advantage, and A max(rho, 1 - low) for a negative one. Bounds
    # come before exp. Otherwise a clipped ratio beyond float32's range would give 0 x inf in the gradient.
    bounded = torch.where(
        tokens.advantages >= 0,
        log_ratio.clamp(max=math.log1p(clip.high)),
        log_ratio.clamp(min=math.log1p(-clip.low)),
    )
    return -tokens.advantages * bounded.exp()


def clipped_stops(log_ratio: torch.Tensor, tokens: TrainedTokens, clip: Clip) -> Stops:
    """Returns the tokens for which `clipped` gives no gradient."""
    return Stops(
        low=(log_ratio < math.log1p(-clip.low)) & (tokens.advantages < 0),
        high=(log_ratio > math.log1p(clip.high)) & (tokens.advantages > 0),
    )


def weighted_likelihood(log_ratio: torch.Tensor, tokens: TrainedTokens, clip: Clip) -> torch.Tensor:
    """Returns float32[M]: -sg[min(rho, high)] A log pi; sg stops the gradient.

    Every token has a gradient, even if its ratio is clipped. MiniMax 2025 (MiniMax-M1, CISPO), eq. 4 and 5.
    """
    ratio = log_ratio.detach().clamp(max=math.log(clip.high)).exp()
    return -ratio * tokens.advantages * tokens.logprobs


def weighted_likelihood_stops(log_ratio: torch.Tensor, tokens: TrainedTokens, clip: Clip) -> Stops:
    """Returns the tokens whose ratio `weighted_likelihood` bounds."""
    high = (log_ratio > math.log(clip.high)) & (tokens.advantages != 0)
    return Stops(torch.zeros_like(high), high)
