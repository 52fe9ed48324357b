"""From leased groups to tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gristmill import PolicyVersion, TrajectoryGroup
from gristmill_trainer.advantages import group_advantages

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class MicroBatch:
    """B sequences padded on the right to the longest, T tokens. M is the number of trained tokens among them.

    The policy's logits at position t-1 give the log-probability of token t, so `rows` and `columns`
    point at the predecessors of the trained tokens.
    """

    tokens: torch.Tensor
    """int64[B, T]."""
    attention: torch.Tensor
    """int64[B, T]: 1 where there is a token."""
    rows: torch.Tensor
    """int64[M]: sequence of each trained token."""
    columns: torch.Tensor
    """int64[M]: position before each trained token."""
    targets: torch.Tensor
    """int64[M]: the trained tokens."""
    rollout_logprobs: torch.Tensor
    """float32[M]: what the model server said when it sampled them; NaN where nobody recorded it."""
    advantages: torch.Tensor
    """float32[M]: the sequence's advantage, at each of its tokens."""
    temperatures: torch.Tensor
    """float32[M]: sampling temperature."""


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step's data and its statistics."""

    micro_batches: list[MicroBatch]
    trained_tokens: int
    tokens: int
    reward_mean: float
    reward_std: float
    staleness_mean: float
    completion_tokens_mean: float


@dataclass(frozen=True)
class _Sequence:
    tokens: np.ndarray[tuple[int], np.dtype[np.int32]]
    logprobs: np.ndarray[tuple[int], np.dtype[np.float32]]
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]]
    advantage: float
    temperature: float


def build_step(
    groups: Sequence[TrajectoryGroup], batch_size: int, seq_len: int, policy: PolicyVersion, device: torch.device
) -> StepBatch:
    """Pad the groups' sequences, in order, into micro-batches of `batch_size` sequences.

    Tokens beyond `seq_len` are not trained on; how many sequences were cut is logged.
    """
    sequences = [sequence for group in groups for sequence in _sequences(group, seq_len)]
    cut = sum(int((group.lengths > seq_len).sum()) for group in groups)
    if cut:
        _LOG.warning(
            "%d of %d sequences are longer than seq_len=%d; their tails are not trained", cut, len(sequences), seq_len
        )
    micro_batches = [
        _pad(sequences[start : start + batch_size], device) for start in range(0, len(sequences), batch_size)
    ]
    rewards = np.concatenate([group.rewards for group in groups])
    completion_tokens = sum(int(group.mask.sum()) for group in groups)
    return StepBatch(
        micro_batches=micro_batches,
        trained_tokens=sum(len(micro.targets) for micro in micro_batches),
        tokens=sum(len(group.tokens) for group in groups),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        staleness_mean=float(np.mean([policy.step - group.oldest_version.step for group in groups])),
        completion_tokens_mean=completion_tokens / len(sequences),
    )


def _sequences(group: TrajectoryGroup, seq_len: int) -> Iterator[_Sequence]:
    advantages = group_advantages(group.rewards)
    start = 0
    for length, advantage in zip(group.lengths.tolist(), advantages.tolist(), strict=True):
        piece = slice(start, start + min(length, seq_len))
        logprobs = group.logprobs[piece] if group.logprobs_known else np.full(min(length, seq_len), np.nan, np.float32)
        mask = group.mask[piece].copy()
        mask[0] = False  # A first token has no predecessor that could predict it.
        yield _Sequence(group.tokens[piece], logprobs, mask, advantage, group.sampling.temperature)
        start += length


def _pad(sequences: Sequence[_Sequence], device: torch.device) -> MicroBatch:
    longest = max(len(sequence.tokens) for sequence in sequences)
    tokens = np.zeros((len(sequences), longest), np.int64)
    attention = np.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
        attention[row, : len(sequence.tokens)] = 1
    positions = [np.flatnonzero(sequence.mask) for sequence in sequences]
    counts = [len(found) for found in positions]
    columns = np.concatenate(positions) - 1
    rows = np.repeat(np.arange(len(sequences)), counts)

    def floats(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, np.float32), counts)).to(device)

    rollout = np.concatenate([s.logprobs[found] for s, found in zip(sequences, positions, strict=True)])
    return MicroBatch(
        tokens=torch.from_numpy(tokens).to(device),
        attention=torch.from_numpy(attention).to(device),
        rows=torch.from_numpy(rows).to(device),
        columns=torch.from_numpy(columns).to(device),
        targets=torch.from_numpy(tokens[rows, columns + 1]).to(device),
        rollout_logprobs=torch.from_numpy(rollout).to(device),
        advantages=floats([sequence.advantage for sequence in sequences]),
        temperatures=floats([sequence.temperature for sequence in sequences]),
    )
