"""What a forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the sequences lie. Packed: one row, sequences one after the other, and attention stays inside each.
    Padded: a row each, filled up on the right."""

    tokens: torch.Tensor
    """int64[R, T]."""
    positions: torch.Tensor
    """int64[R, T]: place of the token in its own sequence."""
    starts: torch.Tensor | None
    """int32[S + 1]: packed: first token of each sequence in the row, and T at the end."""
    attention: torch.Tensor | None
    """int64[R, T]: padded: 1 where there is a token."""
    longest: int
    """Tokens of the longest sequence."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """S sequences that go through the model at once. M of their tokens are trained; they lie flat, sequence after
    sequence. The logits at a position predict the next token, so `sources` points at predecessors."""

    layout: Layout
    sources: torch.Tensor
    """int64[M]: index into the flattened [R * T] of the position before each trained token."""
    targets: torch.Tensor
    """int64[M]: the trained tokens."""
    sequence: torch.Tensor
    """int64[M]: which of the S sequences the token is of."""
    sequences: int
    """S."""
    rollout_logprobs: torch.Tensor
    """float32[M]."""
    advantages: torch.Tensor
    """float32[M]."""
    temperatures: torch.Tensor
    """float32[M]."""
    weights: torch.Tensor
    """float32[M]: the token's share of the step's loss; the aggregation that the objective asks for is in it."""
    old_logprobs: torch.Tensor | None = None
    """float32[M], or None: this forward pass' own, held still."""
    ref_logprobs: torch.Tensor | None = None
    """float32[M]."""
    teacher_ids: torch.Tensor | None = None
    """int64[M, K]; -1 stands for none."""
    teacher_logprobs: torch.Tensor | None = None
    """float32[M, K]; -inf where the id is -1."""
    index: tuple[int, ...] = ()
    """Which of the step's samples the sequences are, in order."""

    @property
    def tokens(self) -> int:
        """Tokens, padding left out."""
        if self.layout.starts is not None:
            return self.layout.tokens.numel()
        assert self.layout.attention is not None
        return int(self.layout.attention.sum())
