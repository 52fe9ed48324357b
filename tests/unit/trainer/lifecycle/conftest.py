"""A learner as the trainer assembles it, on a small random model."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from tests.support.groups import make_group

from gristmill import PolicyVersion, TrajectoryGroup
from gristmill_trainer.checkpoint.contents import Progress
from gristmill_trainer.data.checks import Limits
from gristmill_trainer.data.samples import Prepared, to_samples
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.learner import Learner
from gristmill_trainer.learner_factory import LearnerPlan, build_learner
from gristmill_trainer.model_state import LearnerState
from gristmill_trainer.policy import ModelSource, Policy
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.publisher import FilesystemTransport
from gristmill_trainer.settings import TrainerSettings

LIMITS = Limits(vocabulary=64, seq_len=512, policy=PolicyVersion(1, 0))
SETTINGS = TrainerSettings(
    device="cpu", batch_size=4, learning_rate=1e-2, lr_schedule="cosine", warmup_steps=2, num_epochs=2, minibatches=2
)


class StandInTransport(FilesystemTransport):
    """A transport without model servers."""

    def __init__(self) -> None:
        self.servers: Any = mock.create_autospec(ModelServers, instance=True)
        self.servers.wake.return_value = []

    def sleep(self) -> None:
        self.servers.sleep(2)


@dataclass
class Training:
    learner: Learner
    state: LearnerState

    @property
    def policy(self) -> Policy:
        return self.learner.policy

    def step(self, step: int) -> None:
        self.learner.step(to_samples(step_groups(step), LIMITS, SETTINGS).samples, step)


def start_training(source: ModelSource, weights: str | None = None) -> Training:
    return Training(*build_learner(LearnerPlan(source, weights, SETTINGS, None), DistContext()))


def step_groups(step: int) -> list[TrajectoryGroup]:
    return [make_group(f"g{2 * step + n:08d}", lengths=[(3, 4), (3, 6)], seed=2 * step + n) for n in range(2)]


def prepare(step: int, groups: Sequence[TrajectoryGroup]) -> Prepared:
    return to_samples(groups, LIMITS, SETTINGS)


def progress(
    step: int,
    incarnation: int = 1,
    covered: Sequence[str] = (),
    origin: str | None = None,
    creation: str = "",
) -> Progress:
    version = PolicyVersion(incarnation, step)
    return Progress(step, version, f"{incarnation}.{step}", list(covered), origin=origin, creation=creation)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Restores the signal handlers, because a StopRequest leaves its own handlers."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def training(policy: Policy) -> Training:
    return start_training(policy.source)
