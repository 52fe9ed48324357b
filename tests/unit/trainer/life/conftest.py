"""A learner of the present parts: policy, AdamW, a schedule. Whatever learns in their place goes in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.support.groups import make_group

from gristmill import PolicyVersion, TrajectoryGroup
from gristmill_trainer.batch import build_step
from gristmill_trainer.checkpoint import Progress, SingleProcess
from gristmill_trainer.logprobs import token_logprobs
from gristmill_trainer.loss import Clip, grpo_loss
from gristmill_trainer.policy import ModelSource, Policy


@dataclass
class Training:
    policy: Policy
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    learner: SingleProcess

    def step(self, groups: Sequence[TrajectoryGroup]) -> None:
        batch = build_step(groups, 4, 512, PolicyVersion(1, 0), self.policy.device)
        self.optimizer.zero_grad()
        for micro in batch.micro_batches:
            logprobs = token_logprobs(self.policy, micro)
            # What is drawn at random must come again after a resume.
            noise = 1 + 0.01 * (torch.rand(()) + np.random.random())
            loss = noise * grpo_loss(
                logprobs,
                logprobs.detach(),
                micro.rollout_logprobs,
                micro.advantages,
                batch.trained_tokens,
                Clip(0.2, 0.2, 2.0),
            )
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()


def start_training(source: ModelSource, weights: str | None = None) -> Training:
    policy = Policy(source, "cpu", weights)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Training(policy, optimizer, schedule, SingleProcess(policy, optimizer, schedule))


def step_groups(step: int) -> list[TrajectoryGroup]:
    return [make_group(f"g{2 * step + n:08d}", lengths=[(3, 4), (3, 6)], seed=2 * step + n) for n in range(2)]


def progress(step: int, incarnation: int = 1, covered: Sequence[str] = (), origin: str | None = None) -> Progress:
    return Progress(step, PolicyVersion(incarnation, step), f"{incarnation}.{step}", list(covered), origin)


@pytest.fixture
def training(policy: Policy) -> Training:
    return start_training(policy.source)
