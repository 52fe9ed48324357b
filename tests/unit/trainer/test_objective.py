"""The objective and the log-probabilities, number for number against plain float64 arithmetic."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from tests.support.groups import make_group

from gristmill import PolicyVersion, TrajectoryGroup
from gristmill_trainer import logprobs as logprobs_module
from gristmill_trainer.advantages import group_advantages
from gristmill_trainer.batch import build_step
from gristmill_trainer.logprobs import token_logprobs
from gristmill_trainer.loss import Clip, grpo_loss
from gristmill_trainer.policy import Policy

CLIP = Clip(low=0.2, high=0.28, importance_cap=2.0)
CPU = torch.device("cpu")


def _groups() -> list[TrajectoryGroup]:
    return [
        make_group("g00000001", lengths=[(3, 4), (3, 2), (3, 7), (3, 1)], seed=1),
        make_group("g00000002", lengths=[(6, 5), (6, 5), (6, 2), (6, 9)], seed=2),
    ]


def _gradients(policy: Policy, batch_size: int) -> tuple[float, dict[str, torch.Tensor]]:
    policy.model.zero_grad()
    batch = build_step(_groups(), batch_size, 512, PolicyVersion(1, 0), CPU)
    total = 0.0
    for micro in batch.micro_batches:
        logprobs = token_logprobs(policy, micro)
        loss = grpo_loss(
            logprobs, logprobs.detach(), micro.rollout_logprobs, micro.advantages, batch.trained_tokens, CLIP
        )
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total, {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_whole_softmax(policy: Policy, temperature: float) -> None:
    group = make_group(lengths=[(3, 4), (5, 2)])
    group = dataclasses.replace(group, sampling=type(group.sampling)(temperature=temperature, max_tokens=9))
    (micro,) = build_step([group], 2, 512, PolicyVersion(1, 0), CPU).micro_batches
    ours = token_logprobs(policy, micro).detach().numpy()
    expected = []
    start = 0
    for length in group.lengths.tolist():
        tokens = torch.tensor(group.tokens[start : start + length].astype(np.int64))[None]
        logits = policy.model(input_ids=tokens).logits[0].double().detach() / temperature
        everything = torch.log_softmax(logits, dim=-1)
        expected += [float(everything[t - 1, tokens[0, t]]) for t in range(length) if group.mask[start + t]]
        start += length
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_chunks_of_the_head_change_nothing(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, whole = _gradients(policy, 8)
    monkeypatch.setattr(logprobs_module, "CHUNK", 3)
    chunked_loss, chunked = _gradients(policy, 8)
    assert chunked_loss == pytest.approx(loss, abs=1e-6)
    for name in whole:
        torch.testing.assert_close(chunked[name], whole[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_accumulated_gradients_are_those_of_one_batch(policy: Policy, batch_size: int) -> None:
    loss, whole = _gradients(policy, 8)
    split_loss, split = _gradients(policy, batch_size)
    assert split_loss == pytest.approx(loss, abs=1e-6)
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], atol=1e-6, rtol=1e-4)


def _reference(ratio: float, advantage: float, weight: float) -> float:
    clipped = min(max(ratio, 1 - CLIP.low), 1 + CLIP.high)
    return -weight * min(ratio * advantage, clipped * advantage)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.1, 1.5])
@pytest.mark.parametrize("off_policy", [0.5, 1.0, 4.0])
def test_loss_is_the_clipped_surrogate_with_a_capped_weight(advantage: float, ratio: float, off_policy: float) -> None:
    old = torch.tensor([-1.0])
    new = old + math.log(ratio)
    rollout = old - math.log(off_policy)
    loss = grpo_loss(new, old, rollout, torch.tensor([advantage]), 1, CLIP)
    assert float(loss) == pytest.approx(_reference(ratio, advantage, min(off_policy, 2.0)), rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"), [(1.5, 1.0, False), (0.5, -1.0, False), (0.5, 1.0, True), (1.5, -1.0, True)]
)
def test_the_clip_stops_the_gradient_on_the_right_side(ratio: float, advantage: float, moves: bool) -> None:
    old = torch.tensor([-1.0])
    new = (old + math.log(ratio)).requires_grad_()
    grpo_loss(new, old, old, torch.tensor([advantage]), 1, CLIP).backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert bool(new.grad.abs() > 0) is moves


def test_advantages_are_those_of_the_group() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 0.0], np.float32)
    expected = (rewards - 0.5) / (np.std(rewards, ddof=1) + 1e-4)
    np.testing.assert_allclose(group_advantages(rewards), expected, rtol=1e-6)
    np.testing.assert_array_equal(group_advantages(np.full(4, 0.3, np.float32)), np.zeros(4))
    np.testing.assert_array_equal(group_advantages(np.array([0.25], np.float32)), [0.25])


def test_tokens_beyond_seq_len_are_not_trained() -> None:
    batch = build_step([make_group(lengths=[(3, 10), (3, 2)])], 2, 8, PolicyVersion(1, 0), CPU)
    assert batch.trained_tokens == 5 + 2
    assert batch.micro_batches[0].tokens.shape == (2, 8)


def test_staleness_counts_steps_since_the_oldest_token() -> None:
    groups = [make_group(version="1.3"), make_group(version="1.5")]
    assert build_step(groups, 4, 512, PolicyVersion(1, 5), CPU).staleness_mean == 1.0
