"""One sequence, as it is trained on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher's likeliest tokens at each position, for distillation. K of them; an id of -1 stands for none."""

    ids: I32
    """i32[L, K]: candidates for the token at this position."""
    logprobs: F32
    """f32[L, K]: their log-probabilities under the teacher."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A prompt and its completion. L tokens."""

    group_id: str
    tokens: I32
    """i32[L]."""
    trained: Bool
    """bool[L]: the tokens that the loss counts; never the first, which nothing predicts. May be all False: such a
    sample counts as a sequence, and gives no gradient."""
    rollout_logprobs: F32
    """f32[L]: log mu, by the model server under the sampling distribution; 0 where not trained. NaN where it is and
    nobody recorded them (see `rollout_known`): then the old policy stands in for mu."""
    advantages: F32
    """f32[L]."""
    temperature: float
    """The sampling temperature; logits are divided by it."""
    old_logprobs: F32 | None = None
    """f32[L]: log pi_old, of the policy before the step's first update; None: the policy that is being trained, held
    still."""
    ref_logprobs: F32 | None = None
    """f32[L]: log pi_ref, for the KL penalty."""
    teacher: Teacher | None = None
    rollout_known: bool = True
    """False for groups of Atropos' environments that sent no inference_logprobs."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def trained_tokens(self) -> int:
        return int(self.trained.sum())
