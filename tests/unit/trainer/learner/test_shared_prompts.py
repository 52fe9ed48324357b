"""A step whose groups compute their prompts once is the step that computes every sequence whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.trainer.learner.learning import Build, assert_same_bits, farthest, make_samples, weights
from tests.unit.trainer.learner.test_branches import complete

from gristmill_trainer.data.types import MicroBatch, Sample
from gristmill_trainer.learner import Learner


def with_prompts(samples: Sequence[Sample], length: int = 24) -> list[Sample]:
    """Puts a prompt of the group before each sequence."""
    found = []
    for sample in samples:
        rng = np.random.default_rng(int(sample.group_id[1:]))
        nothing = np.zeros(length, np.float32)
        found.append(
            replace(
                sample,
                tokens=np.concatenate([rng.integers(0, 64, length, dtype=np.int32), sample.tokens]),
                trained=np.concatenate([nothing > 0, sample.trained]),
                rollout_logprobs=np.concatenate([nothing, sample.rollout_logprobs]),
                advantages=np.concatenate([nothing, sample.advantages]),
            )
        )
    return found


def computed(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> list[MicroBatch]:
    """Returns the micro-batches that the learner computes from now on."""
    found = []
    real = learner.policy.scorer

    def scored(micro: MicroBatch, **options: Any) -> Any:
        found.append(micro)
        return real(micro, **options)

    monkeypatch.setattr(learner.policy, "scorer", scored)
    return found


CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "gspo in a budget": {"objective": "gspo", "token_budget": 90},
    "penalties and a teacher": {"kl_beta": 0.3, "entropy_coef": 0.05, "batch_size": 3},
    "several updates": {"num_epochs": 2, "minibatches": 2, "importance_level": "sequence", "max_grad_norm": 0.1},
    "recomputed layers": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("case", CASES)
def test_step_with_shared_prompts_is_the_step_of_whole_sequences(build: Build, case: str) -> None:
    settings = {"plain": True, "max_grad_norm": 1e6} | CASES[case]
    shared, whole = build(**settings), build(**settings)
    assert shared.sharing
    whole.sharing = False
    before = weights(whole)
    samples = complete(with_prompts(make_samples()))
    found, wanted = shared.step(samples, 1), whole.step(samples, 1)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6, abs=1e-6)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
    assert (found.tokens, found.trained_tokens) == (wanted.tokens, wanted.trained_tokens)
    assert found.flops is not None
    assert wanted.flops is not None
    assert found.flops < wanted.flops
    assert sorted(found.order) == sorted(wanted.order)
    assert farthest(weights(shared), weights(whole)) <= 1e-6
    assert farthest(before, weights(whole)) > 1e-4


def test_repeated_step_with_shared_prompts_has_the_same_bits(build: Build) -> None:
    samples = with_prompts(make_samples())
    one, other = build(), build()
    assert one.step(samples, 1).loss == other.step(samples, 1).loss
    assert_same_bits(weights(one), weights(other))


def test_budget_counts_a_prompt_once_and_the_share_of_copied_keys(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = with_prompts([replace(sample, group_id="g0") for sample in make_samples()])
    answers = sum(len(sample) - 24 for sample in samples)
    learner = build(token_budget=24 + answers)
    micros = computed(learner, monkeypatch)
    learner.step(samples, 1)
    assert [micro.tokens for micro in micros] == [24 + answers]
    learner._copied_key = 0.01
    micros.clear()
    learner.step(samples, 2)
    assert len(micros) == 2
    assert sum(micro.tokens for micro in micros) == 2 * 24 + answers


def test_reference_and_log_probabilities_with_shared_prompts_are_those_of_whole_sequences(build: Build) -> None:
    samples = with_prompts(make_samples())
    shared, whole = build(token_budget=80), build(token_budget=80)
    whole.sharing = False
    for mine, other in zip(shared.logprobs(samples), whole.logprobs(samples), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)
