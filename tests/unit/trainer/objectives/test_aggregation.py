"""Shares of micro-batches add up to the update's loss, however its sequences are divided."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.errors import raises
from tests.support.trained_tokens import part, random_tokens, weighted

from gristmill.hyperparameters import Hyperparameters, ObjectiveName
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.objectives import Objective, token_weights

OBJECTIVES: list[ObjectiveName] = ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "gspo"]
EVERYTHING = {"importance_level": "sequence", "kl_beta": 0.1, "entropy_coef": 0.02, "distill_coef": 0.5}


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(any), data=st.data())
def test_micro_batch_shares_add_up_to_the_updates_loss(
    objective: ObjectiveName, lengths: list[int], data: st.DataObject
) -> None:
    weights = token_weights(objective, np.array(lengths), 2, 9)
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)))) | {0, len(lengths)})
    chosen = Objective.of(Hyperparameters.model_validate({"objective": objective, **EVERYTHING}))

    whole = weighted(random_tokens(1, lengths, torch.float32), weights)
    loss, _ = chosen.loss(whole)
    loss.backward()  # type: ignore[no-untyped-call]
    again = weighted(random_tokens(1, lengths, torch.float32), weights)
    shares = [chosen.loss(part(again, list(order[first:end])))[0] for first, end in pairwise(cuts)]
    for share in shares:
        share.backward()  # type: ignore[no-untyped-call]
    assert sum(share.item() for share in shares) == pytest.approx(loss.item(), abs=1e-6)
    for name in ("logprobs", "entropy", "student_logprobs"):
        torch.testing.assert_close(getattr(again, name).grad, getattr(whole, name).grad, atol=1e-6, rtol=0)


def test_aggregation_weights_of_a_small_update_match_hand_computed_values() -> None:
    trained = np.array([2, 0, 3, 5, 4])

    def weights(objective: ObjectiveName) -> list[float]:
        return [float(weight) for weight in token_weights(objective, trained, 2, 10)]

    assert weights("dapo") == weights("cispo") == [1 / 14, 0, 1 / 14, 1 / 14, 1 / 14]
    assert weights("grpo") == weights("gspo") == [1 / 10, 0, 1 / 15, 1 / 25, 1 / 20]
    # Three local batches of 2, 8 and 4 tokens; the last is not full.
    assert weights("bnpo") == [1 / 6, 0, 1 / 24, 1 / 24, 1 / 12]
    assert weights("dr_grpo") == [1 / 50, 0, 1 / 50, 1 / 50, 1 / 50]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_aggregation_weights_without_trained_tokens_are_zero(objective: ObjectiveName) -> None:
    assert token_weights(objective, np.zeros(3, np.int64), 2, 10).tolist() == [0, 0, 0]


def test_dr_grpo_without_a_longest_completion_names_the_missing_value() -> None:
    with raises(TrainerError, "max_completion_length_missing", objective="dr_grpo"):
        token_weights("dr_grpo", np.array([1]), 1)
