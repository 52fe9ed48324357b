"""The policies in addition to the trained policy: old, rollout, reference, teacher."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from tests.unit.trainer.learner.learning import Build, farthest, make_samples, teach, weights

from gristmill_trainer.data.types import Sample, Teacher
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.learner import Learner
from gristmill_trainer.metrics import measure
from gristmill_trainer.settings import TrainerSettings


def test_old_policy_is_the_policy_before_the_first_update(build: Build) -> None:
    learner, samples = build(num_epochs=2, learning_rate=1e-2), make_samples()
    tokens = sum(sample.trained_tokens for sample in samples)
    before = np.concatenate([row[one.trained] for row, one in zip(learner.logprobs(samples), samples, strict=True)])
    token_stats = learner.step(samples, 1).token_stats
    ratio = np.exp(token_stats.logprobs - token_stats.old_logprobs)
    assert len(ratio) == 2 * tokens
    assert ratio[:tokens] == pytest.approx(1.0, abs=1e-5)
    assert np.abs(ratio[tokens:] - 1.0).max() > 0.01
    assert token_stats.old_logprobs[:tokens] == pytest.approx(before, abs=1e-6)
    assert token_stats.old_logprobs[tokens:] == pytest.approx(before, abs=1e-6)


def test_second_minibatch_trains_an_updated_policy(build: Build) -> None:
    learner, samples = build(minibatches=4, learning_rate=1e-2), make_samples()
    result = learner.step(samples, 1)
    assert len(result.token_stats.logprobs) == sum(sample.trained_tokens for sample in samples), "each token once"
    assert result.tokens == sum(len(sample) for sample in samples)
    ratio = np.exp(result.token_stats.logprobs - result.token_stats.old_logprobs)
    assert np.abs(ratio - 1.0).max() > 0.01
    assert np.abs(ratio - 1.0).min() <= 1e-5, "the first minibatch meets the old policy"


def test_old_policy_is_not_needed_for_one_update(build: Build) -> None:
    token_stats = build().step(make_samples(), 1).token_stats
    assert np.array_equal(token_stats.logprobs, token_stats.old_logprobs)


def test_old_policy_replaces_an_unrecorded_rollout_policy(build: Build) -> None:
    samples = make_samples()
    unknown = [
        replace(one, rollout_logprobs=np.where(one.trained, np.nan, 0).astype(np.float32), rollout_known=False)
        for one in samples
    ]
    learner, corrected = build(importance_cap=1.5), build(importance_correction="none")
    result = learner.step(unknown, 1)
    assert result.skipped is None
    assert np.array_equal(result.token_stats.rollout_logprobs, result.token_stats.old_logprobs)
    assert result.loss == pytest.approx(corrected.step(samples, 1).loss, abs=1e-6)
    assert farthest(weights(learner), weights(corrected)) <= 1e-6


def test_rollout_policy_is_used_if_it_is_recorded(build: Build) -> None:
    samples = make_samples()
    assert abs(build().step(samples, 1).loss - build(importance_correction="none").step(samples, 1).loss) > 1e-4


def with_reference(learner: Learner, samples: Sequence[Sample], shift: float = 0.0) -> list[Sample]:
    found = learner.logprobs(samples)
    return [
        replace(one, ref_logprobs=np.where(one.trained, row + shift, 0).astype(np.float32))
        for one, row in zip(samples, found, strict=True)
    ]


def test_ratio_to_the_rollout_policy_is_clipped_at_the_first_update(build: Build) -> None:
    samples = make_samples()
    far = [replace(one, rollout_logprobs=np.where(one.trained, -9.0, 0).astype(np.float32)) for one in samples]
    learner, capped = build(ratio_policy="rollout", plain=True), build(plain=True)
    result, other = learner.step(far, 1), capped.step(far, 1)
    token_stats = result.token_stats
    ratio = np.exp(token_stats.logprobs - token_stats.rollout_logprobs)
    assert token_stats.ratio == pytest.approx(ratio, rel=1e-5)
    assert np.array_equal(token_stats.clipped_high > 0, (ratio > 1.28) & (token_stats.advantages > 0))
    assert not other.token_stats.clipped_high.any(), "the ratio to the old policy is 1"
    assert result.loss != pytest.approx(other.loss)


LOSSES = """
def likelihood(tokens):
    return -(tokens.logprobs - tokens.logprobs.detach()).exp() * tokens.advantages

def of_sequences(tokens):
    sums = tokens.logprobs.new_zeros(tokens.sequences).index_add(0, tokens.sequence, tokens.logprobs)
    return sums[tokens.sequence]

def scalar(tokens):
    return tokens.logprobs.sum()

def constant(tokens):
    return tokens.advantages

def noisy(tokens):
    import random, numpy, torch
    noise = torch.rand(()) + numpy.random.random() + random.random()
    return likelihood(tokens) * noise
"""


def test_loss_of_the_user_takes_the_place_of_the_objectives_own(build: Build, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOSSES)
    samples = make_samples()
    mine = build(policy_loss=f"{tmp_path}/mine.py:likelihood", plain=True)
    theirs = build(plain=True)  # With one update the clipped ratio is 1, and so is this one.
    assert mine.step(samples, 1).loss == pytest.approx(theirs.step(samples, 1).loss, abs=1e-6)
    assert farthest(weights(mine), weights(theirs)) <= 1e-6
    settings = TrainerSettings(policy_loss="mine.py:of_sequences")
    assert settings.joins_branches
    assert settings.record()["policy_loss"] == "mine.py:of_sequences"
    assert build(policy_loss=f"{tmp_path}/mine.py:of_sequences").step(samples, 1).skipped is None


def test_random_numbers_of_a_loss_depend_on_the_step_only(build: Build, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOSSES)
    samples = make_samples()

    def loss(step: int, *, seed: int = 0, drawn: int = 0) -> float:
        learner = build(policy_loss=f"{tmp_path}/mine.py:noisy", seed=seed)
        torch.rand(drawn)
        return learner.step(samples, step).loss

    first = loss(2)
    assert loss(2, drawn=3) == first
    assert loss(3) != first
    assert loss(2, seed=1) != first


@pytest.mark.parametrize("name", ["scalar", "constant"])
def test_loss_of_the_user_without_a_gradient_per_token_is_refused(build: Build, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(LOSSES)
    path = f"{tmp_path}/mine.py:{name}"
    with raises(TrainerError, "policy_loss_invalid", policy_loss=path):
        build(policy_loss=path).step(make_samples(), 1)


def test_groups_own_reference_logprobs_need_no_reference_model(build: Build) -> None:
    samples = make_samples()
    near, far = build(kl_beta=1.0), build(kl_beta=1.0)
    assert near.step(with_reference(near, samples), 1).loss == pytest.approx(build().step(samples, 1).loss, abs=1e-6)
    # k3 of a difference of 0.5 at every token.
    penalty = math.exp(0.5) - 1 - 0.5
    loss = far.step(with_reference(far, samples, shift=0.5), 1).loss
    assert loss == pytest.approx(build().step(samples, 1).loss + penalty, abs=1e-5)


def test_reference_model_scores_groups_without_reference_logprobs(build: Build) -> None:
    samples, moved = make_samples(), build(learning_rate=1e-2)
    teach(moved, samples, steps=3)
    own, model = build(kl_beta=1.0), build(kl_beta=1.0, reference=moved.policy)
    spoken = moved.logprobs(samples)
    brought = [replace(one, ref_logprobs=row) for one, row in zip(samples, spoken, strict=True)]
    wanted = own.step(brought, 1)
    # One group brings its own value, which is kept.
    found = model.step([*brought[:2], *samples[2:]], 1)
    assert found.loss == pytest.approx(wanted.loss, abs=1e-6)
    assert found.token_stats.ref_logprobs == pytest.approx(wanted.token_stats.ref_logprobs, abs=1e-6)
    assert wanted.loss > build().step(samples, 1).loss + 1e-3


def test_with_lora_the_reference_is_the_policy_without_its_adapters(build: Build) -> None:
    samples = make_samples()
    model = build().policy
    torch.manual_seed(0)
    without = build(lora_rank=2, kl_beta=1.0)
    torch.manual_seed(0)
    beside = build(lora_rank=2, kl_beta=1.0, reference=model)
    for step in range(1, 4):
        free, loaded = without.step(samples, step), beside.step(samples, step)
        assert free.loss == pytest.approx(loaded.loss, abs=1e-6)
        assert free.grad_norm == pytest.approx(loaded.grad_norm, rel=1e-5)
    assert measure(free.token_stats).kl_ref == pytest.approx(measure(loaded.token_stats).kl_ref, abs=1e-6)
    assert abs(free.token_stats.logprobs - free.token_stats.ref_logprobs).max() > 1e-3, "the adapters have not moved"


def test_reference_logprobs_of_some_groups_have_no_effect_without_a_penalty(build: Build) -> None:
    learner, samples = build(batch_size=2), make_samples()
    token_stats = learner.step([*with_reference(learner, samples[:2]), *samples[2:]], 1).token_stats
    assert np.isnan(token_stats.ref_logprobs).any()
    assert measure(token_stats).kl_ref is None


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_policy_equal_to_its_teacher_stays_if_positions_have_fewer_tokens(build: Build, direction: str) -> None:
    """With a teacher of two tokens, some positions bring one token and others none. Absent tokens must not affect the
    gradient."""
    learner = build(distill_divergence=direction, plain=True, max_grad_norm=1e6)
    silent = [replace(one, advantages=np.zeros_like(one.advantages)) for one in make_samples()]
    ids = [np.stack([one.tokens, (one.tokens + 1) % 64], axis=1).astype(np.int32) for one in silent]
    spoken = []
    for column in (0, 1):
        # The policy's own words: its log-probability of each token at that position.
        asked = [
            replace(one, tokens=np.where(one.trained, own[:, column], one.tokens).astype(np.int32))
            for one, own in zip(silent, ids, strict=True)
        ]
        spoken.append([_first_trained(learner, one, other) for one, other in zip(silent, asked, strict=True)])
    taught = []
    for number, (one, own) in enumerate(zip(silent, ids, strict=True)):
        first = int(np.flatnonzero(one.trained)[0])
        known, said = np.full_like(own, -1), np.zeros(own.shape, np.float32)
        for column in range(1 + number % 2):
            known[first, column], said[first, column] = own[first, column], spoken[column][number]
        taught.append(replace(one, teacher=Teacher(known, said)))
    result = learner.step(taught, 1)
    assert result.loss == pytest.approx(0, abs=1e-6)
    assert result.grad_norm <= 1e-4
    # The policy learns from a teacher that differs.
    apart = [replace(one, teacher=Teacher(one.teacher.ids, one.teacher.logprobs - 1)) for one in taught if one.teacher]
    assert build(distill_divergence=direction).step(apart, 1).loss > 1e-3


def _first_trained(learner: Learner, one: Sample, other: Sample) -> float:
    """Returns the policy's log-probability of `other`'s first trained token, after `one`'s prompt."""
    first = int(np.flatnonzero(one.trained)[0])
    return float(learner.logprobs([other])[0][first])
