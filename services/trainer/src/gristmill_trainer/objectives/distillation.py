"""Divergence from a teacher of whom only the likeliest tokens are known."""

from __future__ import annotations

from typing import Literal

import torch

# What float32 leaves of 1 minus a sum of probabilities near 1 is noise.
_LEAST_REST = 1e-6


def divergence(
    teacher_logprobs: torch.Tensor, student_logprobs: torch.Tensor, direction: Literal["forward", "reverse"]
) -> torch.Tensor:
    """float32[M], never below 0 but for rounding: the divergence at each position, over K + 1 outcomes.

        p_k, q_k: the teacher's and the policy's probability of the teacher's token k, as given, not renormalised
        p_0 = 1 - sum_k p_k,  q_0 = 1 - sum_k q_k: any other token; not below 1e-6
        forward: sum_k=0..K p_k log(p_k / q_k),   reverse: sum_k=0..K q_k log(q_k / p_k)

    That is a true divergence of the two distributions with all other tokens made one, so at most the divergence over
    the whole vocabulary, and equal to it where K is the vocabulary. Renormalising over the K would leave the policy
    free to put its mass elsewhere, and teach nothing at K = 1.

    `teacher_logprobs`, `student_logprobs`: float32[M, K] as in TrainedTokens; an entry of -inf of the teacher is
    absent. A position without entries gives 0 and no gradient: both sides are sure of "any other token".
    """
    present = teacher_logprobs > -torch.inf
    teacher = _with_rest(teacher_logprobs.masked_fill(~present, 0.0), present)
    student = _with_rest(student_logprobs.masked_fill(~present, 0.0), present)
    counts = torch.nn.functional.pad(present, (0, 1), value=True)
    over, other = (teacher, student) if direction == "forward" else (student, teacher)
    return (counts * over.exp() * (over - other)).sum(dim=1)


def _with_rest(logprobs: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """float32[M, K + 1]: with the log-probability of any other token at the end."""
    rest = (1 - (present * logprobs.exp()).sum(dim=1, keepdim=True)).clamp(min=_LEAST_REST).log()
    return torch.cat([logprobs, rest], dim=1)
