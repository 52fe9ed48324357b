"""The effective sample size and the estimated reward, by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from tests.support.groups import make_group

from gristmill import Hyperparameters, PolicyVersion
from gristmill_trainer.data.checks import Limits
from gristmill_trainer.data.samples import to_samples
from gristmill_trainer.metrics import StepResult, TokenStats
from gristmill_trainer.replay.retrainer import off_policy


def test_effective_sample_size_and_reward_of_two_completions() -> None:
    group = make_group(lengths=((3, 4), (3, 2)), rewards=(1.0, 0.0))
    samples = to_samples([group], Limits(64, 100, PolicyVersion(1, 0)), Hyperparameters()).samples
    # The micro-batches have the second completion first: its weight is exp(2 * 0.5) = e, the first one's exp(0) = 1.
    nothing = np.zeros(6, np.float32)
    stats = TokenStats(*[nothing] * 11)
    stats = dataclasses.replace(stats, old_logprobs=np.array([0.5, 0.5, 0, 0, 0, 0], np.float32) - 1,
                                rollout_logprobs=nothing - 1)  # fmt: skip
    result = StepResult(0.0, 0.0, stats, 12, 6, None, order=(1, 0))
    found = off_policy([group], samples, result)
    assert found is not None
    assert found.effective_sample_size == pytest.approx((1 + math.e) ** 2 / (2 * (1 + math.e**2)))
    assert found.reward == pytest.approx(1 / (1 + math.e))


def test_branches_of_a_rollout_have_one_weight_and_one_reward() -> None:
    group = make_group(lengths=((3, 1), (3, 1), (3, 2)), rewards=(1.0, 1.0, 0.0), rollouts=(0, 0, 1))
    samples = to_samples([group], Limits(64, 100, PolicyVersion(1, 0)), Hyperparameters()).samples
    # The weight of the first rollout is exp(0.75 + 0.25) = e, and the weight of the second is 1.
    stats = TokenStats(*[np.zeros(4, np.float32)] * 11)
    stats = dataclasses.replace(stats, old_logprobs=np.array([0.75, 0, 0, 0.25], np.float32))
    found = off_policy([group], samples, StepResult(0.0, 0.0, stats, 13, 4, None, order=(0, 2, 1)))
    assert found is not None
    assert found.effective_sample_size == pytest.approx((1 + math.e) ** 2 / (2 * (1 + math.e**2)))
    assert found.reward == pytest.approx(math.e / (1 + math.e))


def test_completion_without_a_trained_token_has_no_weight() -> None:
    """Its ratio of 1 would be the largest weight."""
    group = make_group(lengths=((3, 2), (3, 2)), rewards=(1.0, 0.0))
    first, second = to_samples([group], Limits(64, 100, PolicyVersion(1, 0)), Hyperparameters()).samples
    samples = [first, dataclasses.replace(second, trained=np.zeros_like(second.trained))]
    stats = TokenStats(*[np.zeros(2, np.float32)] * 11)
    stats = dataclasses.replace(stats, old_logprobs=np.array([-0.5, -0.5], np.float32))
    found = off_policy([group], samples, StepResult(0.0, 0.0, stats, 10, 2, None, order=(0, 1)))
    assert found is not None
    assert (found.effective_sample_size, found.reward) == (1.0, 1.0)


def test_step_without_log_probabilities_of_the_server_has_no_sample_size() -> None:
    group = make_group()
    made = to_samples([group], Limits(64, 100, PolicyVersion(1, 0)), Hyperparameters()).samples
    samples = [dataclasses.replace(sample, rollout_known=False) for sample in made]
    result = StepResult(0.0, 0.0, TokenStats(*[np.zeros(6, np.float32)] * 11), 12, 6, None, order=(0, 1))
    assert off_policy([group], samples, result) is None
