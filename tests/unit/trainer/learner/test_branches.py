"""A rollout that is split into branches trains like the same rollout as one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.grids import part_of_grid
from tests.unit.trainer.learner.learning import Build, farthest, make_samples, weights
from tests.unit.trainer.learner.test_memory import small_memory

from gristmill_trainer.data.types import MicroBatch, Sample, Teacher
from gristmill_trainer.learner import Learner

OBJECTIVES = ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "gspo"]
EVERYTHING = {"kl_beta": 0.3, "kl_bias_correction": True, "entropy_coef": 0.05, "distill_coef": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "weight per token": {"importance_cap": 1.1, **EVERYTHING},
    "weight per sequence": {"importance_level": "sequence", "importance_cap": 1.3, **EVERYTHING},
    "masked per sequence": {"importance_level": "sequence", "importance_correction": "mask", "importance_cap": 1.3},
    "no weight": {"importance_correction": "none", "kl_beta": 0.3, "kl_estimator": "k2"},
    "several updates": {"num_epochs": 3, "minibatches": 2, "importance_level": "sequence", "max_grad_norm": 0.1},
}
CUTS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "token budget": {"token_budget": 40},
    "padded, a few at once": {"packing": False, "batch_size": 3},
}


def complete(samples: Sequence[Sample]) -> list[Sample]:
    """Adds random log-probabilities of a reference, and a teacher."""
    rng = np.random.default_rng(1)
    found = []
    for sample in samples:
        length = len(sample)
        teacher = Teacher(
            np.tile(np.array([3, 9], np.int32), (length, 1)),
            np.log(rng.dirichlet(np.ones(3), length)[:, :2]).astype(np.float32),
        )
        ref = np.where(sample.trained, -4.0 + 0.3 * rng.normal(size=length), 0).astype(np.float32)
        found.append(replace(sample, ref_logprobs=ref, teacher=teacher))
    return found


def branch(sample: Sample, start: int, end: int, rollout: int) -> Sample:
    """Returns the sample up to token `end`, trained from token `start` on: the context of each token is the same."""
    trained = sample.trained[:end] & (np.arange(end) >= start)
    assert sample.ref_logprobs is not None
    assert sample.teacher is not None
    return replace(
        sample,
        tokens=sample.tokens[:end],
        trained=trained,
        rollout_logprobs=np.where(trained, sample.rollout_logprobs[:end], np.float32(0)),
        advantages=sample.advantages[:end],
        ref_logprobs=sample.ref_logprobs[:end],
        teacher=Teacher(sample.teacher.ids[:end], sample.teacher.logprobs[:end]),
        rollout=rollout,
    )


def in_branches(samples: Sequence[Sample]) -> list[Sample]:
    """Splits the first of each group's two rollouts, and nothing else, at a trained token."""
    found = []
    for number, sample in enumerate(samples):
        length = len(sample)
        cut = length - (sample.trained_tokens + 1) // 2 if number % 2 == 0 else length
        parts = [(0, cut), (cut, length)] if cut < length else [(0, length)]
        found += [branch(sample, start, end, number % 2) for start, end in parts]
    assert len(found) == len(samples) + len(samples) // 2
    return found


@pytest.mark.parametrize(("objective", "kind", "cut"), part_of_grid(OBJECTIVES, KINDS, CUTS, every=5))
def test_split_of_a_rollout_into_branches_changes_neither_loss_nor_gradient(
    build: Build, objective: str, kind: str, cut: str
) -> None:
    # bnpo's local batches are a part of the objective.
    batch = {"batch_size": 3} if objective == "bnpo" and "batch_size" in CUTS[cut] else {}
    settings = {"objective": objective, "plain": True, "max_grad_norm": 1e6} | KINDS[kind]
    whole, split = build(**settings, **batch), build(**settings | CUTS[cut])
    before = weights(whole)
    samples = complete(make_samples())
    expected, found = whole.step(samples, 1), split.step(in_branches(samples), 1)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=2e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert farthest(weights(split), weights(whole)) <= 2e-6
    assert farthest(before, weights(whole)) > 1e-4


def test_branches_of_a_rollout_share_a_micro_batch_if_a_ratio_needs_all_of_them(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = in_branches(complete(make_samples()))

    def micro_batches(learner: Learner) -> list[tuple[int, ...]]:
        found = []
        real = learner.policy.scorer

        def scored(micro: MicroBatch, **options: Any) -> Any:
            found.append(micro.index)
            return real(micro, **options)

        monkeypatch.setattr(learner.policy, "scorer", scored)
        learner.step(samples, 1)
        return found

    rollouts = {(0, 1), (2,), (3, 4), (5,), (6, 7), (8,), (9, 10), (11,)}
    assert set(micro_batches(build(objective="gspo", batch_size=1))) == rollouts
    assert set(micro_batches(build(importance_level="sequence", batch_size=1))) == rollouts
    assert micro_batches(build(batch_size=1)) == [(number,) for number in range(12)]
    assert max(map(len, micro_batches(build(objective="gspo", batch_size=6)))) == 6


@pytest.mark.long
def test_memory_runs_out_with_branches_and_the_update_is_repeated_with_whole_rollouts(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = in_branches(complete(make_samples()))
    expected, learner = (build(objective="gspo", plain=True, num_epochs=2, max_grad_norm=0.1) for _ in range(2))
    # The first branch of a rollout is the beginning of the second, and costs no tokens.
    longest = max(map(len, samples))
    seen = small_memory(learner, monkeypatch, longest, torch.OutOfMemoryError)
    whole, split = expected.step(samples, 1), learner.step(samples, 1)
    assert (split.skipped, split.left_out) == (None, 0)
    assert split.halved > 0
    assert longest in seen
    assert split.loss == pytest.approx(whole.loss, abs=1e-6)
    assert farthest(weights(learner), weights(expected)) <= 1e-6
