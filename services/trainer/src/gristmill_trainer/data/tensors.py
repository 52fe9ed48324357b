"""Inputs of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of sequences in rows. Packed: all sequences share one row, and attention stays inside each sequence.
    Padded: one row per sequence, padded on the right."""

    tokens: torch.Tensor
    """int64[R, T]: token ids."""
    positions: torch.Tensor
    """int64[R, T]: index of the token in its sequence."""
    starts: torch.Tensor | None
    """int32[S + 1] if packed: first token of each sequence in the row, then T."""
    attention: torch.Tensor | None
    """int64[R, T] if padded: 1 for tokens, 0 for padding."""
    longest: int
    """Tokens of the longest sequence."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """S sequences for one forward pass. Their M trained tokens are flat, sequence after sequence. The logits at a
    position predict the next token, so `sources` contains the positions before the trained tokens."""

    layout: Layout
    sources: torch.Tensor
    """int64[M]: position before each trained token, as an index into the flattened [R * T]."""
    targets: torch.Tensor
    """int64[M]: ids of the trained tokens."""
    sequence: torch.Tensor
    """int64[M]: index of the token's sequence, below S."""
    sequences: int
    """S, the number of sequences."""
    rollout_logprobs: torch.Tensor
    """float32[M]."""
    advantages: torch.Tensor
    """float32[M]."""
    temperatures: torch.Tensor
    """float32[M]."""
    weights: torch.Tensor
    """float32[M]: the token's weight in the update's loss, from the objective's aggregation."""
    old_logprobs: torch.Tensor | None = None
    """float32[M]; None: the log-probabilities of this forward pass, detached."""
    ref_logprobs: torch.Tensor | None = None
    """float32[M]."""
    teacher_ids: torch.Tensor | None = None
    """int64[M, K]; -1 for absent entries."""
    teacher_logprobs: torch.Tensor | None = None
    """float32[M, K]; -inf for an id of -1."""
    index: tuple[int, ...] = ()
    """Index of each sequence among the step's samples."""

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        if self.layout.starts is not None:
            return self.layout.tokens.numel()
        assert self.layout.attention is not None
        return int(self.layout.attention.sum())
