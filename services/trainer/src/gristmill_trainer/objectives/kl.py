"""Estimators of KL(pi || pi_ref) from a token that pi drew, with r = pi_ref / pi. Schulman 2020, "Approximating KL
Divergence" (joschu.net/blog/kl-approx.html). Each takes log pi and log pi_ref, float32[M], and gives float32[M]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """-log r: unbiased, and negative as often as not. As a loss its gradient is 0 on average, on policy."""
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """(log r)^2 / 2: biased, never negative; on policy its gradient is that of the divergence itself."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r: unbiased, never negative."""
    log_r = ref_logprobs - logprobs
    # expm1, not exp - 1: a small difference keeps its digits.
    return torch.expm1(log_r) - log_r


ESTIMATORS: dict[Literal["k1", "k2", "k3"], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}
