"""Penalties: the divergence from a reference model, and the divergence from a teacher.

The estimators k1, k2 and k3 estimate KL(pi || pi_ref) from a token that pi drew, with r = pi_ref / pi. They take log pi
and log pi_ref, float32[M], and return float32[M]. Schulman 2020, "Approximating KL Divergence"
(joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

# In float32, 1 minus a sum of probabilities near 1 is mostly rounding error.
_LEAST_REST = 1e-6


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


KL_ESTIMATORS: dict[Literal["k1", "k2", "k3"], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}


def divergence(
    teacher_logprobs: torch.Tensor, student_logprobs: torch.Tensor, direction: Literal["forward", "reverse"]
) -> torch.Tensor:
    """Returns float32[M]: the divergence at each position over K + 1 outcomes, at least 0 except for rounding.

        p_k, q_k: the teacher's and the policy's probability of the teacher's token k, not renormalised
        p_0 = 1 - sum_k p_k,  q_0 = 1 - sum_k q_k: any other token; not below 1e-6
        forward: sum_k=0..K p_k log(p_k / q_k),   reverse: sum_k=0..K q_k log(q_k / p_k)

    This is the divergence of the two distributions with all other tokens merged. It is at most the divergence over the
    whole vocabulary, and equal to it if K is the vocabulary. Renormalising over the K tokens would let the policy move
    its probability to other tokens, and give no gradient at K = 1.

    `teacher_logprobs`, `student_logprobs`: float32[M, K] as in TrainedTokens; -inf of the teacher is an absent entry.
    A position without entries gives 0 and no gradient, because both sides assign everything to "any other token".
    """
    present = teacher_logprobs > -torch.inf
    teacher = _with_rest(teacher_logprobs.masked_fill(~present, 0.0), present)
    student = _with_rest(student_logprobs.masked_fill(~present, 0.0), present)
    counts = torch.nn.functional.pad(present, (0, 1), value=True)
    over, other = (teacher, student) if direction == "forward" else (student, teacher)
    return (counts * over.exp() * (over - other)).sum(dim=1)


def _with_rest(logprobs: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Returns float32[M, K + 1]: log-probabilities, and the log-probability of any other token at the end."""
    rest = (1 - (present * logprobs.exp()).sum(dim=1, keepdim=True)).clamp(min=_LEAST_REST).log()
    return torch.cat([logprobs, rest], dim=1)
