"""The GRPO objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Clip:
    """How far the objective lets the policy move and how much it trusts the rollouts."""

    low: float
    high: float
    importance_cap: float


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    trained_tokens: int,
    clip: Clip,
) -> torch.Tensor:
    """This micro-batch's share of the step's loss; the shares of all micro-batches add up. All tensors float32[M].

        l = -min(rho A, clip(rho, 1-low, 1+high) A),   rho = exp(log pi - log pi_old)
        w = min(exp(log pi_old - log mu), C)           the server's own sampling probability is mu
        loss = sum(w l) / trained_tokens               tokens of the whole step: a global token mean

    Clipped surrogate: Schulman et al. 2017, eq. 7; group advantages: Shao et al. 2024 (GRPO); token mean over the
    step: Yu et al. 2025 (DAPO); truncated importance weight: Yao et al. 2025.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = torch.clamp(ratio, 1 - clip.low, 1 + clip.high)
    surrogate = -torch.minimum(ratio * advantages, clipped * advantages)
    weight = torch.exp(old_logprobs - rollout_logprobs).clamp(max=clip.importance_cap)
    return (weight.detach() * surrogate).sum() / trained_tokens
