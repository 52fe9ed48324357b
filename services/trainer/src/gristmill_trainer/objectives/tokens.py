"""What an objective sees of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class TrainedTokens:
    """The M trained tokens of a micro-batch's S sequences, flat. float32[M] where nothing else is said."""

    logprobs: torch.Tensor
    """log pi, with its gradient."""
    old_logprobs: torch.Tensor
    """log pi_old: the policy before the step's first update."""
    rollout_logprobs: torch.Tensor
    """log mu: what the model server said when it sampled."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """The token's share of the step's loss: losses of micro-batches and ranks add up."""
    sequence: torch.Tensor
    """int64[M]: the token's sequence, 0 to S - 1, in rising order."""
    sequences: int
    """S."""
    entropy: torch.Tensor | None = None
    """Of the distribution that the token was drawn from, in nats; with its gradient where the objective wants it."""
    entropy_weight: float = 0.0
    """1 / trained tokens of the step, all micro-batches and ranks."""
    ref_logprobs: torch.Tensor | None = None
    """log pi_ref."""
    teacher_logprobs: torch.Tensor | None = None
    """float32[M, K]: of the teacher's tokens, by the teacher."""
    student_logprobs: torch.Tensor | None = None
    """float32[M, K]: of the same tokens, by the policy, with their gradient; entries without a teacher are -inf in
    `teacher_logprobs` and 0 here."""
