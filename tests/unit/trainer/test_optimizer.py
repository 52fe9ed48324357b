"""The learning rate at each step, and which optimizer is built."""

from __future__ import annotations

import math

import pytest
import torch

from gristmill.hyperparameters import Hyperparameters
from gristmill_trainer.optimizer import build_optimizer, learning_rate


def rates(schedule: str, warmup: int, steps: int) -> list[float]:
    given = {"learning_rate": 8.0, "lr_schedule": schedule, "warmup_steps": warmup, "training_steps": steps}
    settings = Hyperparameters.model_validate(given)
    return [learning_rate(settings, step) for step in range(1, steps + 1)]


def test_learning_rate_follows_the_formula_of_its_schedule() -> None:
    assert rates("constant", 0, 3) == [8, 8, 8]
    assert rates("constant", 3, 5) == [2, 4, 6, 8, 8]
    assert rates("linear", 0, 4) == [8, 6, 4, 2]
    assert rates("linear", 1, 5) == [4, 8, 6, 4, 2]
    half = 4 * (1 + math.cos(math.pi / 4))
    assert rates("cosine", 1, 5) == pytest.approx([4, 8, half, 4, 8 - half])


def test_a_warm_up_as_long_as_the_run_ends_below_the_peak() -> None:
    assert rates("linear", 3, 3) == [2, 4, 6]


def test_optimizer_step_matches_adamw_with_the_settings() -> None:
    settings = Hyperparameters(learning_rate=0.1, weight_decay=0.5, adam_beta1=0.8, adam_beta2=0.9)
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2))
    optimizer = build_optimizer(settings, [ours])
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.9), weight_decay=0.5, foreach=False, fused=False)
    for step in range(3):
        for parameter in (ours, theirs):
            parameter.grad = torch.linspace(1, 2, 5) * (step + 1)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)
