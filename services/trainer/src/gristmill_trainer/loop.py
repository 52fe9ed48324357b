"""The training loop.

GRPO on scored groups of completions: lease a step's groups from the trajectory API, take one optimizer step,
publish the new weights into the running model server, and ack the groups once a durable checkpoint covers them.

Simplifications, on purpose: one process, one optimizer step a batch (so the policy ratio is 1 where it is taken),
no KL term and no reference model, a constant learning rate.

A kill at any point loses no group and trains none twice in the weights that survive: what is not acked returns to
the queue, what the last checkpoint covers is settled when the next trainer takes the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gristmill import PolicyVersion, RunRecord, SyncClient, TrajectoryGroup
from gristmill.logs import line
from gristmill.metrics import JsonlWriter, StepMetrics
from gristmill_trainer.batch import StepBatch, build_step
from gristmill_trainer.checkpoint import CheckpointStore, Progress, SingleProcess
from gristmill_trainer.display import Display
from gristmill_trainer.leases import Leases
from gristmill_trainer.logprobs import token_logprobs
from gristmill_trainer.loss import Clip, grpo_loss
from gristmill_trainer.policy import Policy
from gristmill_trainer.publish import WeightPublisher
from gristmill_trainer.settings import TrainerSettings
from gristmill_trainer.stop import StopRequest

_LOG = logging.getLogger(__name__)
# Seconds of one long-poll for groups; between two the trainer looks after the model server.
_POLL = 5.0


@dataclass
class Phases:
    """Wall time of one step, by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float
    logprob_diff_mean: float
    logprob_diff_max: float


@dataclass(frozen=True)
class Training:
    """All that the loop works with; put together in setup.py."""

    settings: TrainerSettings
    run: RunRecord
    api: SyncClient
    policy: Policy
    optimizer: torch.optim.Optimizer
    publisher: WeightPublisher
    checkpoints: CheckpointStore
    leases: Leases
    metrics: JsonlWriter
    display: Display
    stop: StopRequest
    incarnation: int
    first_step: int
    """Optimizer steps that the resumed checkpoint has behind it."""
    origin: str | None
    """The checkpoint that --resume named, if it named one."""
    seq_len: int
    final_model: Path
    """Folder of the finished run's model."""


def train(training: Training) -> None:
    """Train to `training_steps`. Raises StoppedError when asked to stop before."""
    settings, run_id = training.settings, training.run.run_id
    version = PolicyVersion(training.incarnation, training.first_step)
    publish(training, version)

    while version.step < settings.training_steps:
        step, phases = version.step + 1, Phases()
        with phases("wait"):
            groups = wait_for_groups(training, version)
        with phases("pack"):
            batch = build_step(groups, settings.batch_size, training.seq_len, version, training.policy.device)
        with phases("train"):
            result = optimizer_step(training, batch)
        training.leases.trained(step)
        version = PolicyVersion(training.incarnation, step)
        due = step % settings.checkpoint_interval == 0 or step == settings.training_steps
        if due or training.stop.requested:
            with phases("checkpoint"):
                learner = SingleProcess(training.policy, training.optimizer)
                covered, batch_id = training.leases.covered, training.leases.batch_id(step)
                training.checkpoints.save(learner, Progress(step, version, batch_id, covered, training.origin))
                training.leases.ack()
        with phases("publish"):
            publish(training, version)
        report(training, version, batch, result, phases)
        training.stop.raise_if_requested()

    training.policy.export(training.final_model)
    training.api.finish(run_id, training.incarnation)
    _LOG.info("run %s is finished after %d steps; its model: %s", run_id, version.step, training.final_model)


def wait_for_groups(training: Training, version: PolicyVersion) -> list[TrajectoryGroup]:
    """Lease the next step's groups, however long the environment takes for them."""
    count = training.run.groups_per_step or 0
    started, told = time.monotonic(), 0.0
    while True:
        training.stop.raise_if_requested()
        groups = training.leases.take(version.step + 1, count, _POLL)
        if groups is not None:
            return groups
        # A restarted server is back on its first weights, and the environment waits for ours.
        training.publisher.ensure(version)
        waited = time.monotonic() - started
        if waited - told >= 60:
            status = training.api.status(training.run.run_id)
            _LOG.warning(
                "no batch for %.0f s: %d of %d groups ready, %d permits out; is the environment running?",
                waited, status.ready, count, status.outstanding,
            )  # fmt: skip
            told = waited


def optimizer_step(training: Training, batch: StepBatch) -> StepResult:
    """Accumulate the gradient over the micro-batches, clip, step."""
    settings, policy = training.settings, training.policy
    low = settings.clip_epsilon or 0.2
    clip = Clip(low, settings.clip_epsilon_high or low, settings.importance_cap)
    training.optimizer.zero_grad(set_to_none=True)
    loss_sum, diff_sum, diff_max = 0.0, 0.0, 0.0
    for micro in batch.micro_batches:
        with policy.compute():
            logprobs = token_logprobs(policy, micro)
        # One optimizer step a batch: the old policy is this one, held still. It stands in for a rollout policy whose
        # log-probabilities nobody recorded.
        old = logprobs.detach()
        rollout = torch.where(micro.rollout_logprobs.isnan(), old, micro.rollout_logprobs)
        loss = grpo_loss(logprobs, old, rollout, micro.advantages, batch.trained_tokens, clip)
        loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.item()
        difference = (old - rollout).abs()
        diff_sum += float(difference.sum())
        diff_max = max(diff_max, float(difference.max()))
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), settings.max_grad_norm)
    training.optimizer.step()
    return StepResult(loss_sum, float(grad_norm), diff_sum / batch.trained_tokens, diff_max)


def publish(training: Training, version: PolicyVersion) -> None:
    """Bring the weights to the server, then tell the API, which lets the environment go on."""
    training.publisher.publish(training.policy.served_tensors(), version)
    training.api.record_version(training.run.run_id, version)
    _LOG.info(line("published", run=training.run.run_id, version=version))


def report(training: Training, version: PolicyVersion, batch: StepBatch, result: StepResult, phases: Phases) -> None:
    metrics = StepMetrics(
        step=version.step,
        policy_version=str(version),
        reward_mean=batch.reward_mean,
        reward_std=batch.reward_std,
        loss=result.loss,
        grad_norm=result.grad_norm,
        staleness_mean=batch.staleness_mean,
        completion_tokens_mean=batch.completion_tokens_mean,
        rollout_logprob_diff_mean=result.logprob_diff_mean,
        rollout_logprob_diff_max=result.logprob_diff_max,
        tokens=batch.tokens,
        seconds=phases.seconds,
    )
    training.metrics.append(metrics)
    training.api.report_metrics(training.run.run_id, "trainer", version.step, metrics.values())
    training.display.step(metrics)
