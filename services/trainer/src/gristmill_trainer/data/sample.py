"""One sequence for training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def trained_tokens(self) -> int:
        return int(self.trained.sum())
