"""The input of an objective: the trained tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class TrainedTokens:
    """The M trained tokens of a micro-batch's S sequences, flat. Tensors are float32[M] unless documented otherwise."""

    logprobs: torch.Tensor
    """log pi, with its gradient."""
    old_logprobs: torch.Tensor
    """log pi_old: the policy before the step's first update."""
    rollout_logprobs: torch.Tensor
    """log mu: the model server's log-probabilities at sampling."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """The token's weight in the update's loss, which is a sum over micro-batches and ranks."""
    sequence: torch.Tensor
    """int64[M]: the token's sequence, 0 to S - 1, in ascending order."""
    sequences: int
    """S."""
    entropy: torch.Tensor | None = None
    """Entropy of the distribution that the token was drawn from, in nats; with gradient if the objective needs it."""
    entropy_weight: float = 0.0
    """1 / trained tokens of the update, over all micro-batches and ranks."""
    ref_logprobs: torch.Tensor | None = None
    """log pi_ref."""
    teacher_logprobs: torch.Tensor | None = None
    """float32[M, K]: the teacher's log-probabilities of the teacher's tokens."""
    student_logprobs: torch.Tensor | None = None
    """float32[M, K]: the policy's log-probabilities of the same tokens, with gradient. Absent entries are 0 here and
    -inf in `teacher_logprobs`."""
