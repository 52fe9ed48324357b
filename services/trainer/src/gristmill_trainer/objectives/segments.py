"""Sums and means over the tokens of each sequence."""

from __future__ import annotations

import torch

from gristmill_trainer.objectives.tokens import TrainedTokens


def sequence_sums(values: torch.Tensor, tokens: TrainedTokens) -> torch.Tensor:
    """Returns float32[M] from float32[M]: at each token, the sum over the trained tokens of its sequence."""
    return _sums(values, tokens)[tokens.sequence]


def sequence_means(values: torch.Tensor, tokens: TrainedTokens) -> torch.Tensor:
    """Returns float32[M] from float32[M]: at each token, the mean over the trained tokens of its sequence."""
    return (_sums(values, tokens) / _sums(torch.ones_like(values), tokens))[tokens.sequence]


def _sums(values: torch.Tensor, tokens: TrainedTokens) -> torch.Tensor:
    return values.new_zeros(tokens.sequences).index_add(0, tokens.sequence, values)
