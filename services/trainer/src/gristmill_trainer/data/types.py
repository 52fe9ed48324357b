"""The types of a step's data: sequences for training, dropped groups and sequences, and the inputs of a forward pass.

`samples.to_samples` makes `Sample` and `Rejected` of groups. `micro_batches.collate` makes a `MicroBatch` of samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher's K likeliest tokens at each position, for distillation. An id of -1 is an absent entry."""

    ids: I32
    """i32[L, K]: candidates for the token at this position."""
    logprobs: F32
    """f32[L, K]: their log-probabilities under the teacher."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A prompt and its completion, L tokens."""

    group_id: str
    tokens: I32
    """i32[L]."""
    trained: Bool
    """bool[L]: the tokens in the loss; never the first token, because no token predicts it. A sample with only False
    counts as a sequence and gives no gradient."""
    rollout_logprobs: F32
    """f32[L]: the model server's log mu under the sampling distribution; 0 for untrained tokens. If mu was not recorded
    (`rollout_known`), trained tokens have NaN, and the old policy replaces mu."""
    advantages: F32
    """f32[L]."""
    temperature: float
    """The sampling temperature; logits are divided by it."""
    old_logprobs: F32 | None = None
    """f32[L]: log pi_old, of the policy before the step's first update; None: the current policy, detached."""
    ref_logprobs: F32 | None = None
    """f32[L]: log pi_ref, for the KL penalty."""
    teacher: Teacher | None = None
    rollout_known: bool = True
    """False for groups of Atropos environments that sent no inference_logprobs."""
    sequence: int = 0
    """Index in the group."""
    rollout: int | None = None
    """The rollout in the group of which this sample is a branch; None: the sample is a whole rollout."""

    @classmethod
    def scored(cls, tokens: I32, trained: Bool, teacher: Teacher | None = None) -> Sample:
        """Returns a sample for its log-probabilities of the tokens in `trained` alone."""
        nothing = np.zeros(len(tokens), np.float32)
        return cls("", tokens, trained, nothing, nothing, 1.0, teacher=teacher)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def trained_tokens(self) -> int:
        return int(self.trained.sum())


def rollouts_of(samples: Sequence[Sample]) -> npt.NDArray[np.int64]:
    """Returns i64[len(samples)]: the rollout of each sample, counted from 0 in the order of the samples."""
    numbers: dict[Hashable, int] = {}
    keys = (place if one.rollout is None else (one.group_id, one.rollout) for place, one in enumerate(samples))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


class Reason(StrEnum):
    """Why a group or one of its sequences was dropped. The values are the names of the counts."""

    STALE = "stale"
    """Group: its oldest token was sampled by weights further back than max_staleness."""
    OVERRIDES = "overrides"
    """Group: its overrides have a wrong type, or do not match its sequences."""
    DISTILLATION = "distillation"
    """Sequence: a teacher's token or log-probability is not valid."""
    OUTSIDE_VOCABULARY = "outside_vocabulary"
    """Sequence: the model has no embedding for a token id."""
    NOTHING_TRAINED = "nothing_trained"
    """Sequence: no trained token is left after removing the first token and the tokens beyond seq_len."""
    REF_LOGPROBS = "ref_logprobs"
    """Sequence: a trained token's reference log-probability is positive."""
    OVER_TOKEN_BUDGET = "over_token_budget"
    """Sequence: longer than token_budget, so that no micro-batch can hold it. Also a rollout whose branches need one
    micro-batch."""


@dataclass(frozen=True)
class Rejected:
    """A group, or one of its sequences, that is not trained on."""

    group_id: str
    sequence: int | None
    """Index in the group; None: the whole group."""
    reason: Reason
    detail: str


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of sequences in rows. Packed: the segments of all sequences share one row, and attention stays inside
    each sequence. A segment is a sequence, or a part of one or several sequences. Padded: one row per sequence, padded
    on the right."""

    tokens: torch.Tensor
    """int64[R, T]: token ids."""
    positions: torch.Tensor
    """int64[R, T]: index of the token in its sequence."""
    starts: torch.Tensor | None
    """int32[S + 1] if packed: first token of each segment in the row, then T."""
    parents: torch.Tensor | None
    """int32[S] if sequences share a prefix: the segment before each segment, which has a lower index; -1 for none."""
    attention: torch.Tensor | None
    """int64[R, T] if padded: 1 for tokens, 0 for padding."""
    longest: int
    """Tokens of the longest sequence."""
    squares: int
    """Twice the pairs of a query and a key; for whole sequences, the sum of their squared lengths."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples of S rollouts for one forward pass. Their M trained tokens are flat, sample after sample. The logits at a
    position predict the next token, so `sources` contains the positions before the trained tokens."""

    layout: Layout
    sources: torch.Tensor
    """int64[M]: position before each trained token, as an index into the flattened [R * T]."""
    targets: torch.Tensor
    """int64[M]: ids of the trained tokens."""
    sequence: torch.Tensor
    """int64[M]: index of the token's rollout, below S."""
    sequences: int
    """S, the number of rollouts."""
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
        """Number of tokens without padding. A shared prefix counts once."""
        if self.layout.starts is not None:
            return self.layout.tokens.numel()
        assert self.layout.attention is not None
        return int(self.layout.attention.sum())
