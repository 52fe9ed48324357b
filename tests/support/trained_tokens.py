"""Random trained tokens, for objectives that need no model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from tests.support.objective_reference import Sequence, Token

from gristmill_trainer.objectives import TrainedTokens

K = 3


def random_tokens(seed: int, lengths: list[int], dtype: torch.dtype = torch.float64) -> TrainedTokens:
    """Returns sequences of these numbers of trained tokens, with weights of 1. A quarter of the positions have no
    teacher, and some have fewer than K of its tokens. Log-probabilities, entropies and the policy's logprobs of the
    teacher's tokens require gradients."""
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    logprobs = -rng.gamma(2, 0.7, count)
    teacher, student = (np.log(rng.dirichlet(np.ones(K + 1), count)[:, :K]) for _ in range(2))
    present = np.arange(K) < rng.integers(0, K + 1, count)[:, None]

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return TrainedTokens(
        logprobs=tensor(logprobs).requires_grad_(),
        old_logprobs=tensor(logprobs + rng.normal(0, 0.3, count)),
        rollout_logprobs=tensor(logprobs + rng.normal(0, 0.5, count)),
        advantages=tensor(rng.normal(0, 1, count)),
        weights=torch.ones(count, dtype=dtype),
        sequence=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        sequences=len(lengths),
        entropy=tensor(rng.gamma(2, 1, count)).requires_grad_(),
        entropy_weight=1 / count,
        ref_logprobs=tensor(logprobs + rng.normal(0, 0.5, count)),
        teacher_logprobs=tensor(np.where(present, teacher, -np.inf)),
        student_logprobs=tensor(np.where(present, student, 0)).requires_grad_(),
    )


def part(tokens: TrainedTokens, sequences: list[int]) -> TrainedTokens:
    """Returns these of the sequences, in this order, as a separate micro-batch."""
    places = torch.cat([(tokens.sequence == number).nonzero().flatten() for number in sequences])
    lengths = torch.tensor([int((tokens.sequence == number).sum()) for number in sequences])
    cut: dict[str, Any] = {
        name: value[places] if isinstance(value, torch.Tensor) and name != "sequence" else value
        for name, value in vars(tokens).items()
    }
    cut |= {"sequence": torch.arange(len(sequences)).repeat_interleave(lengths), "sequences": len(sequences)}
    return TrainedTokens(**cut)


def weighted(tokens: TrainedTokens, weights: np.ndarray) -> TrainedTokens:
    """Returns the weight of its sequence, float64[S], at each token."""
    each = torch.from_numpy(weights)[tokens.sequence].to(tokens.logprobs.dtype)
    return dataclasses.replace(tokens, weights=each)


def plain(tokens: TrainedTokens) -> list[Sequence]:
    """Returns the same for the float64 reference."""
    assert tokens.entropy is not None
    assert tokens.ref_logprobs is not None
    assert tokens.teacher_logprobs is not None
    assert tokens.student_logprobs is not None
    sequences: list[Sequence] = [[] for _ in range(tokens.sequences)]
    for place, number in enumerate(tokens.sequence.tolist()):
        pairs = zip(tokens.teacher_logprobs[place].tolist(), tokens.student_logprobs[place].tolist(), strict=True)
        logprob = float(tokens.logprobs[place].detach())
        sequences[number].append(
            Token(
                logprob=logprob,
                old=float(tokens.old_logprobs[place]),
                rollout=float(tokens.rollout_logprobs[place]),
                advantage=float(tokens.advantages[place]),
                ref=float(tokens.ref_logprobs[place]),
                entropy=float(tokens.entropy[place].detach()),
                still=logprob,
                teacher=[pair for pair in pairs if pair[0] > -np.inf],
            )
        )
    return sequences
