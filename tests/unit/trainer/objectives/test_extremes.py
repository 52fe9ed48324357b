"""Ratios beyond a float32 have no effect if they are discarded, and are reported if they are not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gristmill.hyperparameters import Hyperparameters
from gristmill_trainer.objectives import Objective, TrainedTokens

FAR = 200.0  # exp of it is inf in float32


def _objective(**settings: Any) -> Objective:
    return Objective.of(Hyperparameters.model_validate(settings))


def _tokens(log_ratio: float, advantage: float, log_importance: float = 0.0) -> TrainedTokens:
    """Two tokens of one sequence: one with the given values, and one on policy."""
    logprobs = torch.tensor([-1.0, -2.0])
    old = logprobs - torch.tensor([log_ratio, 0.0])
    return TrainedTokens(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=old.detach(),
        rollout_logprobs=old.detach() - torch.tensor([log_importance, 0.0]),
        advantages=torch.full((2,), advantage),
        weights=torch.full((2,), 0.5),
        sequence=torch.zeros(2, dtype=torch.int64),
        sequences=1,
    )


def _run(objective: Objective, tokens: TrainedTokens) -> tuple[float, torch.Tensor]:
    loss, _ = objective.loss(tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    assert tokens.logprobs.grad is not None
    return loss.item(), tokens.logprobs.grad


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize(("log_ratio", "advantage"), [(FAR, 1.0), (FAR, 0.0), (-FAR, -1.0), (-FAR, 1.0)])
def test_objective_with_a_clipped_infinite_ratio_has_no_nan(name: str, log_ratio: float, advantage: float) -> None:
    loss, gradient = _run(_objective(objective=name), _tokens(log_ratio, advantage))
    assert torch.isfinite(torch.tensor(loss))
    assert torch.isfinite(gradient).all()
    assert abs(gradient[0]) < 1e-30


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_objective_with_a_masked_infinite_ratio_has_no_nan(name: str, level: str) -> None:
    objective = _objective(objective=name, importance_correction="mask", importance_level=level)
    loss, gradient = _run(objective, _tokens(FAR, -1.0, log_importance=FAR))
    assert torch.isfinite(torch.tensor(loss))
    assert gradient[0] == 0
    assert bool(gradient[1] != 0) is (level == "token")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_objective_caps_an_infinite_weight(level: str) -> None:
    objective = _objective(importance_cap=2.0, importance_level=level)
    _, gradient = _run(objective, _tokens(0.0, 1.0, log_importance=FAR))
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -1.0 if level == "sequence" else -0.5]))


def test_objective_with_an_unclipped_infinite_ratio_has_infinite_loss() -> None:
    """A negative advantage has no upper clip, so the loss is inf; the loop detects that and skips the step."""
    assert _objective().loss(_tokens(FAR, -1.0))[0].item() == float("inf")


def test_cispo_keeps_a_gradient_if_the_ratio_is_capped() -> None:
    _, gradient = _run(_objective(objective="cispo"), _tokens(FAR, 1.0))
    torch.testing.assert_close(gradient, torch.tensor([-2.5, -0.5]))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_distillation_over_the_whole_vocabulary_equals_the_divergence(direction: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 6, requires_grad=True)
    teacher, student = torch.randn(2, 6).log_softmax(1), logits.log_softmax(1)
    over, other = (teacher, student) if direction == "forward" else (student, teacher)
    expected = (over.exp() * (over - other)).sum(dim=1).mean()
    (slope,) = torch.autograd.grad(expected, logits, retain_graph=True)

    tokens = dataclasses.replace(_tokens(0.0, 0.0), teacher_logprobs=teacher, student_logprobs=student)
    loss, _ = _objective(distill_coef=1.0, distill_divergence=direction).loss(tokens)
    (ours,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(ours, slope, atol=2e-5, rtol=0)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_distillation_learns_from_one_token_of_the_teacher(direction: str) -> None:
    student = torch.tensor([[-3.0], [0.0]], requires_grad=True)
    teacher = torch.tensor([[-0.1], [-torch.inf]])
    tokens = dataclasses.replace(_tokens(0.0, 0.0), teacher_logprobs=teacher, student_logprobs=student)
    loss, _ = _objective(distill_divergence=direction).loss(tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss > 0
    assert student.grad is not None
    assert student.grad[0, 0] < 0, "the policy must raise the probability of its teacher's tokens"
    assert student.grad[1, 0] == 0, "this batch has no teacher"


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_distillation_with_certain_teacher_and_policy_has_no_nan(direction: str) -> None:
    student = torch.tensor([[0.0, -FAR], [1e-7, -FAR]], requires_grad=True)
    teacher = torch.tensor([[0.0, -torch.inf], [-FAR, 1e-7]])
    tokens = dataclasses.replace(_tokens(0.0, 0.0), teacher_logprobs=teacher, student_logprobs=student)
    loss, _ = _objective(distill_divergence=direction).loss(tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)
    assert torch.isfinite(student.grad).all()  # type: ignore[arg-type]
