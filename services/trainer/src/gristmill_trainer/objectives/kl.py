"""Estimators of KL(pi || pi_ref) from a token that pi drew, with r = pi_ref / pi.

Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). Each estimator takes log pi and
log pi_ref, float32[M], and returns float32[M].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Returns -log r: unbiased, as often negative as positive. As a loss, its gradient on policy is 0 on average."""
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Returns (log r)^2 / 2: biased, never negative. On policy, its gradient is the gradient of the divergence."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Returns r - 1 - log r: unbiased, never negative."""
    log_r = ref_logprobs - logprobs
    # expm1 is accurate for small differences; exp - 1 is not.
    return torch.expm1(log_r) - log_r


ESTIMATORS: dict[Literal["k1", "k2", "k3"], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}
