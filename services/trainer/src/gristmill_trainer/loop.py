"""The training loop.

Each step of reinforcement learning leases scored groups of completions from the trajectory API and takes an optimizer
step on the loss in objectives/. The trainer then publishes the new weights to the running model server. It acks the
groups once a durable checkpoint covers them.

A kill at any point loses no group, and the surviving weights contain no group twice. Groups without an ack return to
the queue. The next trainer of the run settles the groups that the last checkpoint covers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from gristmill import ApiError, LeaseSession, PolicyVersion, TrajectoryGroup
from gristmill.metrics import METRICS_FILE, JsonlWriter, StepMetrics
from gristmill.stall import StallGuard
from gristmill_trainer.batch_source import Batch, BatchSource
from gristmill_trainer.checkpoint import CheckpointStore, Progress
from gristmill_trainer.data.samples import Prepared
from gristmill_trainer.disk import writing
from gristmill_trainer.display import Display, WandbTracker
from gristmill_trainer.errors import AbandonedError
from gristmill_trainer.export import Hub, RunFacts, export_model
from gristmill_trainer.hooks import Hook, StepEvent
from gristmill_trainer.metrics import StepResult, step_metrics
from gristmill_trainer.policy import Policy
from gristmill_trainer.publish import Publisher
from gristmill_trainer.quarantine import Quarantine, SkippedSteps, SkipRecord
from gristmill_trainer.rank_group import RankGroup
from gristmill_trainer.settings import TrainerSettings
from gristmill_trainer.stop import StoppedError, StopRequest
from gristmill_trainer.watchdog import Watchdog

_LOG = logging.getLogger(__name__)
# Seconds of one long-poll for groups; between polls the trainer checks the model server.
_POLL = 5.0


@dataclass
class Phases:
    """Wall time by phase between the metrics of two consecutive steps.

    It includes the checkpoint and the publication of the previous step.
    """

    guard: StallGuard
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        self.guard.progress()
        yield
        self.guard.progress()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def slower_than(self, slowest: dict[str, float]) -> dict[str, float]:
        """Returns the longer of two times for each phase."""
        return slowest | {name: max(value, slowest.get(name, 0.0)) for name, value in self.seconds.items()}


@dataclass(frozen=True)
class Training:
    """All objects that the loop uses; startup.py creates them."""

    settings: TrainerSettings
    session: LeaseSession
    ranks: RankGroup
    policy: Policy
    publisher: Publisher
    checkpoints: CheckpointStore
    batches: BatchSource
    quarantine: Quarantine
    skipped: SkippedSteps
    watchdog: Watchdog
    guard: StallGuard
    metrics: JsonlWriter
    tracker: WandbTracker | None
    hook: Hook | None
    model_urls: tuple[str, ...]
    display: Display
    stop: StopRequest
    first_step: int
    """Optimizer steps done before the resumed checkpoint."""
    origin: str | None
    """The checkpoint that `resume` named, or None."""
    facts: RunFacts
    """Facts for the card of the finished model. `finish` adds the final version and reward."""
    hub: Hub | None
    devices: int
    peak_tflops: float | None
    final_model: Path
    """Folder of the finished run's model."""


def train(training: Training) -> None:
    """Trains to `training_steps`. Raises StoppedError if a stop is requested before."""
    settings = training.settings
    version = PolicyVersion(training.session.incarnation, training.first_step)
    training.publisher.publish(training.ranks.served_tensors(), version)

    slowest: dict[str, float] = {}
    reward: float | None = None
    phases = Phases(training.guard)
    while version.step < settings.training_steps:
        step = version.step + 1
        with phases("wait"):
            batch = wait_for_batch(training, version)
        with phases("pack"):
            prepared = batch.prepared
        learning_rate = training.ranks.learner.learning_rate
        with phases("train"):
            try:
                result = optimizer_step(training, prepared, step, slowest)
            except AbandonedError as abandoned:
                leave_step(training, version, abandoned)
        record_outcome(training, version, step, batch.groups, result)
        version = PolicyVersion(training.session.incarnation, step)
        # Metrics come before the checkpoint, so that every step in a checkpoint has metrics even after a kill.
        with checkpoint_on_stop(training, version):
            metrics = report(training, version, prepared, result, learning_rate, phases)
        reward = prepared.statistics.reward_mean
        slowest, phases = phases.slower_than(slowest), Phases(training.guard)
        due = step % settings.checkpoint_interval == 0 or step == settings.training_steps
        if due or training.stop.requested or training.skipped.too_many:
            with phases("checkpoint"):
                checkpoint(training, version)
            slowest = phases.slower_than(slowest)
        training.skipped.raise_if_too_many()
        with phases("publish"), checkpoint_on_stop(training, version):
            training.publisher.publish(training.ranks.served_tensors(), version)
        with checkpoint_on_stop(training, version):
            training.stop.raise_if_requested()  # Check before the hook, which may take minutes of the grace period.
        if training.hook is not None:
            with training.guard.unwatched("on_step"):
                training.hook(StepEvent(training.session.run.run_id, metrics, training.model_urls))
            with checkpoint_on_stop(training, version):
                training.stop.raise_if_requested()

    finish(training, version, reward)


def wait_for_batch(training: Training, version: PolicyVersion) -> Batch:
    """Waits without a time limit for the next step's groups and returns them."""
    training.watchdog.begin()
    while True:
        with checkpoint_on_stop(training, version):
            training.stop.raise_if_requested()
            training.guard.progress()
            batch = training.batches.get(version.step + 1, _POLL)
            if batch is not None:
                return batch
            # A restarted server serves its first weights again, while the environment waits for this trainer's weights.
            training.publisher.ensure()
            training.watchdog.check(str(version), publishing=training.publisher.publishing)


def optimizer_step(training: Training, prepared: Prepared, step: int, slowest: dict[str, float]) -> StepResult:
    """Takes one optimizer step. Raises AbandonedError if a stop is requested and too little time is left.

    `slowest`: seconds of each phase of the slowest step so far.
    """
    started = time.monotonic()

    def should_continue() -> bool:
        training.guard.progress()
        left = max(slowest.get("train", 0.0) - (time.monotonic() - started), 0.0)
        return not training.stop.should_abandon(left + slowest.get("checkpoint", 0.0))

    return training.ranks.step(prepared.samples, step, should_continue)


def record_outcome(
    training: Training, version: PolicyVersion, step: int, groups: list[TrajectoryGroup], result: StepResult
) -> None:
    """Records the outcome of the step's groups. Quarantines the groups if nothing was trained or an update left out."""
    training.session.trained(step)
    problem = result.skipped or result.problem
    if problem is None:
        training.skipped.trained()
        return
    file = training.quarantine.write(
        groups,
        SkipRecord(
            step=step,
            version=str(version),
            problem=problem,
            loss=str(result.loss),
            grad_norm=str(result.grad_norm),
            group_ids=[group.group_id for group in groups],
        ),
    )
    training.skipped.skipped(file, problem)


def leave_step(training: Training, version: PolicyVersion, abandoned: AbandonedError) -> None:
    """Abandons the current step: saves finished steps, gives its groups back, and raises StoppedError."""
    if abandoned.untouched and training.session.covered:
        checkpoint(training, version)
    training.session.give_back(version.step + 1)
    raise StoppedError(
        "stopped",
        "stopped on request within a step; its groups are ready again, and the next start continues from the last "
        "checkpoint",
        given_back=version.step + 1,
    ) from abandoned


@contextmanager
def checkpoint_on_stop(training: Training, version: PolicyVersion) -> Iterator[None]:
    """Writes a checkpoint with all finished steps before an end between two steps.

    Such an end is a stop request (StoppedError) or a suspended run (ApiError).
    """
    try:
        with training.stop.stop_on_timeout():
            yield
    except StoppedError:
        if training.session.covered:
            checkpoint(training, version)
        raise
    except ApiError as error:
        # The API refuses acks of a suspended run. The trainer that resumes the run reports the covered groups.
        if error.code == "suspended" and training.session.covered:
            save(training, version)
        raise


def checkpoint(training: Training, version: PolicyVersion) -> None:
    """Writes the weights to disk, then acks the groups that the weights were trained on."""
    save(training, version)
    training.session.ack()


def save(training: Training, version: PolicyVersion) -> None:
    """Writes the weights to disk, with the ids of the groups trained since the last ack."""
    session = training.session
    training.checkpoints.save(
        training.ranks,
        Progress(
            step=version.step,
            version=version,
            last_batch=session.batch_id(version.step),
            covered=session.covered,
            skipped=training.skipped.files,
            origin=training.origin,
            creation=session.run.creation,
        ),
    )


def report(
    training: Training,
    version: PolicyVersion,
    prepared: Prepared,
    result: StepResult,
    learning_rate: float,
    phases: Phases,
) -> StepMetrics:
    """Sends the step's metrics to metrics.jsonl, the API, the display and the tracker.

    If the API refuses a row, as for an invalid metric name, the trainer logs a warning and continues. The row is then
    only missing in the API.
    """
    metrics: StepMetrics = step_metrics(
        version,
        prepared.statistics,
        result,
        phases.seconds,
        learning_rate=learning_rate,
        device=training.policy.device,
        devices=training.devices,
        peak=training.peak_tflops,
    )
    values = metrics.values()
    with writing(training.final_model.with_name(METRICS_FILE)):
        training.metrics.append({"step": version.step, **values})
    try:
        training.session.report_metrics(version.step, values)
    except ApiError as error:
        if error.code != "bad_request":
            raise
        _LOG.warning("the API takes no metrics of step %d, which are in the run's folder: %s", version.step, error)
    training.display.step(metrics)
    if training.tracker is not None:
        training.tracker.step(metrics)
    return metrics


def finish(training: Training, version: PolicyVersion, final_reward: float | None) -> None:
    """Waits for the last publication, exports the model and finishes the run."""
    training.publisher.wait()
    facts = replace(training.facts, policy_version=str(version), final_reward=final_reward)
    export_model(training.final_model, training.ranks.save_whole, training.policy.source.tokenizer, facts)
    training.session.finish()
    if training.hub is not None:
        with training.guard.unwatched("push_to_hub"):
            training.hub.push(training.final_model)
    run_id = training.session.run.run_id
    _LOG.info("run %s is finished after %d steps; its model: %s", run_id, version.step, training.final_model)
