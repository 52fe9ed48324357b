"""Skipped or abandoned updates and steps: skipped completely, or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.trainer.learner.learning import Build, assert_same_bits, farthest, make_samples, moments, weights

from gristmill_trainer.data.micro_batches import split
from gristmill_trainer.errors import AbandonedError


def test_update_without_a_trained_token_changes_no_weights(build: Build) -> None:
    """An update without a trained token also does not count in the reported means."""
    learner, samples = build(minibatches=2, seed=1), make_samples()
    learner.step(samples, 1)
    groups = [one.group_id for one in samples]
    half = {groups[number] for number in split(groups, 2, seed=1, step=2, epoch=0)[0]}
    other = build(minibatches=1)
    other.policy.model.load_state_dict(learner.policy.model.state_dict())
    other.optimizer.load_state_dict(deepcopy(learner.optimizer.state_dict()))
    quiet = [one if one.group_id in half else replace(one, trained=np.zeros_like(one.trained)) for one in samples]
    result = learner.step(quiet, 2)
    alone = other.step([one for one in samples if one.group_id in half], 2)
    assert farthest(weights(learner), weights(other)) <= 1e-6
    assert (result.loss, result.grad_norm) == pytest.approx((alone.loss, alone.grad_norm), abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_step_with_a_non_finite_loss_changes_no_bit(build: Build, bad: float) -> None:
    learner, samples = build(batch_size=2), make_samples()
    learner.step(samples, 1)
    before, state = weights(learner), moments(learner)
    advantages = samples[5].advantages.copy()
    advantages[-1] = bad
    broken = [*samples[:5], replace(samples[5], advantages=advantages), *samples[6:]]
    result = learner.step(broken, 2)
    assert result.skipped is not None
    assert "loss" in result.skipped
    assert_same_bits(weights(learner), before)
    assert all(torch.equal(one, other) for one, other in zip(moments(learner), state, strict=True))
    after = learner.step(samples, 3)
    assert after.skipped is None, "nothing of the bad gradient is left"
    assert math.isfinite(after.grad_norm)
    assert farthest(weights(learner), before) > 0


def test_step_skips_one_bad_update_and_applies_the_others(build: Build) -> None:
    learner, samples = build(minibatches=4), make_samples()
    bad = replace(samples[5], advantages=samples[5].advantages * np.float32(np.nan))
    before = weights(learner)
    result = learner.step([*samples[:5], bad, *samples[6:]], 1)
    assert (result.skipped, result.left_out) == (None, 1)
    assert math.isfinite(result.loss)
    assert math.isfinite(result.grad_norm)
    assert farthest(weights(learner), before) > 0
    none = learner.step([replace(one, advantages=bad.advantages[-1:].repeat(len(one))) for one in samples], 2)
    assert none.left_out == 4
    assert none.skipped is not None


def test_micro_batch_without_a_trained_token_does_not_reach_the_loss(build: Build, tmp_path: Path) -> None:
    """A user's loss may need a token."""
    (tmp_path / "own.py").write_text("def loss(tokens):\n    return tokens.logprobs * tokens.advantages.max()\n")
    learner = build(batch_size=1, num_epochs=2, kl_beta=0.1, lora_rank=2, policy_loss=f"{tmp_path}/own.py:loss")
    samples = make_samples()
    samples[5] = replace(samples[5], trained=np.zeros_like(samples[5].trained))
    result = learner.step(samples, 1)
    assert (result.skipped, result.left_out) == (None, 0)
    assert result.order == 2 * tuple(range(8))
    assert len(result.token_stats.old_logprobs) == 2 * sum(one.trained_tokens for one in samples)


def test_step_without_a_trained_token_changes_nothing(build: Build) -> None:
    learner, samples = build(), make_samples()
    learner.step(samples, 1)
    before, state = weights(learner), moments(learner)
    for left in ([replace(one, trained=np.zeros_like(one.trained)) for one in samples], []):
        result = learner.step(left, 2)
        assert result.skipped is not None
        assert "nothing is left" in result.skipped
        assert math.isnan(result.loss)
    assert_same_bits(weights(learner), before)
    assert all(torch.equal(one, other) for one, other in zip(moments(learner), state, strict=True))


def test_abandoned_step_keeps_the_weights(build: Build) -> None:
    learner, untouched, samples = build(batch_size=2), build(batch_size=2), make_samples()
    answers: Iterator[bool] = iter([True, True, False])
    with pytest.raises(AbandonedError) as abandoned:
        learner.step(samples, 1, lambda: next(answers))
    assert abandoned.value.untouched
    assert_same_bits(weights(learner), weights(untouched))
    assert learner.step(samples, 1).loss == untouched.step(samples, 1).loss
    assert_same_bits(weights(learner), weights(untouched))


@pytest.mark.parametrize("settings", [{"minibatches": 2}, {"kl_beta": 0.1, "lora_rank": 2}])
def test_step_abandoned_before_its_first_update_is_untouched(build: Build, settings: dict[str, Any]) -> None:
    """While the old policy, or the reference policy, still computes log-probabilities."""
    learner = build(**settings)
    before = weights(learner)
    answers: Iterator[bool] = iter([False])
    with pytest.raises(AbandonedError) as abandoned:
        learner.step(make_samples(), 1, lambda: next(answers))
    assert abandoned.value.untouched
    assert_same_bits(weights(learner), before)


def test_step_abandoned_after_an_update_is_reported_as_touched(build: Build) -> None:
    learner, samples = build(minibatches=2), make_samples()
    before = weights(learner)
    answers: Iterator[bool] = iter([True, True, False])
    with pytest.raises(AbandonedError) as abandoned:
        learner.step(samples, 1, lambda: next(answers))
    assert not abandoned.value.untouched
    assert farthest(weights(learner), before) > 0


def test_step_abandoned_after_a_skipped_update_is_untouched(build: Build) -> None:
    learner = build(num_epochs=2)
    broken = [replace(sample, advantages=sample.advantages * np.float32(np.nan)) for sample in make_samples()]
    before = weights(learner)
    answers: Iterator[bool] = iter([True, True, False])
    with pytest.raises(AbandonedError) as abandoned:
        learner.step(broken, 1, lambda: next(answers))
    assert abandoned.value.untouched
    assert_same_bits(weights(learner), before)


def test_updates_of_a_step_have_the_rate_of_their_step(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = build(num_epochs=2, minibatches=2, warmup_steps=1, lr_schedule="linear", training_steps=5)
    used, update = [], learner.optimizer.step

    def step(*arguments: Any) -> None:
        used.append(learner.optimizer.param_groups[0]["lr"])
        update(*arguments)

    monkeypatch.setattr(learner.optimizer, "step", step)
    results = [learner.step(make_samples(), number) for number in (1, 4)]
    assert used == pytest.approx([0.5e-3] * 4 + [0.5e-3] * 4)
    assert [result.learning_rate for result in results] == [used[0], used[-1]]
