"""The weight of each token in the loss of an optimizer update."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gristmill.hyperparameters import ObjectiveName
from gristmill_trainer.errors import TrainerError

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def token_weights(
    objective: ObjectiveName, trained: I64, local_batch: int, max_completion_length: int | None = None
) -> F64:
    """Returns float64[S]: the weight of each trained token of a sequence; 0 for a sequence without trained tokens.

    The weights are computed over the whole update. Sums over micro-batches and ranks are therefore exact for every
    packing and split of the sequences.

    `trained`: int64[S], trained tokens n_s of each sequence of the whole optimizer update, over all micro-batches and
    ranks, in the order of the batch. A sequence without trained tokens counts as a sequence. The branches of a rollout
    are one sequence.
    `local_batch`: the user's number of sequences per micro-batch; only bnpo uses it.
    `max_completion_length`: the divisor of dr_grpo; only dr_grpo uses it.

        dapo, cispo    1 / sum(n)                           mean over all trained tokens
        grpo, gspo     1 / (n_s S)                          mean over sequences of their token means
        bnpo           1 / (n_b B)                          n_b tokens in local batch b of B: mean over local batches
        dr_grpo        1 / (S max_completion_length)        sum over tokens, divided by a fixed length

    Raises TrainerError for dr_grpo without max_completion_length.
    """
    has_tokens = trained > 0
    divisors = np.ones(len(trained))
    match objective:
        case "dapo" | "cispo":
            divisors[:] = trained.sum()
        case "grpo" | "gspo":
            divisors[:] = trained * len(trained)
        case "bnpo":
            batches = np.arange(len(trained)) // local_batch
            tokens = np.bincount(batches, weights=trained)
            divisors[:] = tokens[batches] * len(tokens)
        case "dr_grpo":
            if max_completion_length is None:
                raise TrainerError(
                    "max_completion_length_missing",
                    f"objective {objective!r} divides by the longest completion allowed, and the run names none; "
                    "set max_completion_length in the trainer's settings",
                    objective=objective,
                )
            divisors[:] = len(trained) * max_completion_length
    return np.divide(1.0, divisors, out=np.zeros(len(trained)), where=has_tokens)
