"""The weight of each token in the loss of an optimizer update."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gristmill.hyperparameters import ObjectiveName
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.objectives.table import RECIPES, Aggregation

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def token_weights(
    objective: ObjectiveName, trained: I64, local_batch: int, max_completion_length: int | None = None
) -> F64:
    """Returns float64[S]: the weight of each trained token of a sequence; 0 for a sequence without trained tokens.

    The weights are computed over the whole update. Sums over micro-batches and ranks are therefore exact for every
    packing and split of the sequences.

    `trained`: int64[S], trained tokens n_s of each sequence of the whole optimizer update, over all micro-batches and
    ranks, in the order of the batch. A sequence without trained tokens counts as a sequence.
    `local_batch`: the user's number of sequences per micro-batch; only bnpo uses it.
    `max_completion_length`: the divisor of dr_grpo; only dr_grpo uses it.

        tokens         1 / sum(n)                           dapo, cispo
        sequences      1 / (n_s S)                          grpo, gspo
        local batches  1 / (n_b B)                          bnpo: n_b tokens in local batch b of B
        fixed length   1 / (S max_completion_length)        dr_grpo

    Raises TrainerError for dr_grpo without max_completion_length.
    """
    has_tokens = trained > 0
    divisors = np.ones(len(trained))
    match RECIPES[objective].aggregation:
        case Aggregation.TOKENS:
            divisors[:] = trained.sum()
        case Aggregation.SEQUENCES:
            divisors[:] = trained * len(trained)
        case Aggregation.LOCAL_BATCHES:
            batches = np.arange(len(trained)) // local_batch
            tokens = np.bincount(batches, weights=trained)
            divisors[:] = tokens[batches] * len(tokens)
        case Aggregation.FIXED_LENGTH:
            if max_completion_length is None:
                raise TrainerError(
                    "max_completion_length_missing",
                    f"objective {objective!r} divides by the longest completion allowed, and the run names none; "
                    "set max_completion_length in the trainer's settings",
                    objective=objective,
                )
            divisors[:] = len(trained) * max_completion_length
    return np.divide(1.0, divisors, out=np.zeros(len(trained)), where=has_tokens)
