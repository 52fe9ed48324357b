"""A learner that takes the recorded steps of a run, with the run's settings or with others from a step on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill import Hyperparameters, PolicyVersion, TrajectoryGroup
from gristmill.internal.settings import merge, parse
from gristmill_trainer.checkpoint.contents import Checkpoint, Progress
from gristmill_trainer.checkpoint.digests import CheckpointRecord, TrainerFacts, file_digests
from gristmill_trainer.checkpoint.store import CheckpointStore
from gristmill_trainer.data.samples import Prepared
from gristmill_trainer.data.types import Sample, rollouts_of
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.learner_factory import LearnerPlan, build_learner
from gristmill_trainer.metrics import StepResult
from gristmill_trainer.replay.recorded import RecordedRun, differences
from gristmill_trainer.settings import TrainerSettings

_KEPT = 2
"""Checkpoints of a retraining that stay on disk."""


@dataclass(frozen=True)
class Change:
    """Settings that differ from the recorded ones."""

    after: int
    """The steps after this step have the other settings."""
    settings: Mapping[str, Any]
    """Hyperparameters by name."""

    @property
    def is_empty(self) -> bool:
        return not self.settings


@dataclass(frozen=True)
class OffPolicy:
    """How well the recorded completions represent the policy in training.

    A rollout s has the importance weight w_s = exp(sum_t log pi(t) - log mu(t)) over its trained tokens, with mu the
    policy that sampled it.
    """

    effective_sample_size: float
    """(sum w)^2 / (n sum w^2) of the n rollouts, from 1/n to 1 (Kish 1965; Kong 1992). On policy it is 1."""
    reward: float
    """sum w r / sum w: the self-normalized estimate of the reward that the policy in training would get."""


@dataclass(frozen=True)
class TakenStep:
    """One step that was taken again."""

    step: int
    version: PolicyVersion
    """Version of the weights that the step produced. With the recorded settings it is the recorded version."""
    prepared: Prepared
    result: StepResult
    off_policy: OffPolicy | None
    """None for a step without trained tokens or without log-probabilities of the server."""
    checkpoint: Checkpoint | None = None
    """The checkpoint that was written after the step."""
    recorded: CheckpointRecord | None = None
    """The record of the original checkpoint after the step; None if there is none, or a setting differs."""

    def differing_files(self) -> list[str] | None:
        """Returns the files whose bytes differ from the recorded checkpoint; None without a recorded checkpoint."""
        if self.checkpoint is None or self.recorded is None:
            return None
        return sorted(differences(self.recorded.files, file_digests(self.checkpoint.path)))


@contextmanager
def recorded_training(run: RecordedRun) -> Iterator[Retrainer]:
    """A retraining with the recorded settings, whose checkpoints are in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="gristmill-retrain-") as folder:
        yield Retrainer(run, Path(folder), Change(0, {}))


class Retrainer:
    """The learner of a retraining, and its place in the recorded run."""

    def __init__(self, run: RecordedRun, folder: Path, change: Change) -> None:
        """`folder`: receives the checkpoints."""
        self.run = run
        self.change = change
        self.step = 0
        """Steps done."""
        self._dist = DistContext()
        # A checkpoint of recorded settings is the run's own checkpoint, with the same creation.
        self._creation = run.checkpoints[0].progress.creation if change.is_empty else "retrained"
        self._store = CheckpointStore(folder, _KEPT, self._creation)
        self._last: Checkpoint | None = None
        """The checkpoint that was loaded or written last."""

    def begin(self, at: int) -> int:
        """Loads the newest checkpoint on disk up to step `at`, or else the weights before any training.

        Returns the checkpoint's step, or 0. Call it before the other methods.
        """
        records = [record for record in self.run.on_disk() if record.step <= at]
        if records:
            self._build(self.run.load(records[-1]), records[-1].step)
        else:
            self._build(None if self.run.origin is None else self.run.load_origin(), 0)
        return self.step

    def steps(self, until: int) -> Iterator[TakenStep]:
        """Takes the steps up to `until`. Writes a checkpoint wherever the run wrote one, and after the last step."""
        while self.step < until:
            step = self.step + 1
            if self.settings != self.settings_of(step):
                self._rebuild()
            groups, prepared = self.prepare(step)
            result = self.learner.step(prepared.samples, step)
            self.step = step
            recorded = self.run.checkpoint_at(step) if self.change.is_empty else None
            checkpoint = None
            if self.run.checkpoint_at(step) is not None or step == until:
                checkpoint = self._save(self._progress(step) if recorded is None else recorded.progress)
            yield TakenStep(
                step=step,
                version=self._version(step) if recorded is None else recorded.progress.version,
                prepared=prepared,
                result=result,
                off_policy=off_policy(groups, prepared.samples, result),
                checkpoint=checkpoint,
                recorded=recorded,
            )

    def prepare(self, step: int) -> tuple[list[TrajectoryGroup], Prepared]:
        """Returns the groups and the samples of a step."""
        return self.run.prepare(step, self.settings_of(step), self.learner.policy.vocabulary)

    def settings_of(self, step: int) -> TrainerSettings:
        """Returns the settings with which this retraining takes `step`."""
        recorded = self.run.settings(step)
        if self.change.is_empty or step <= self.change.after:
            return recorded
        return parse(TrainerSettings, merge(recorded.model_dump(), self.change.settings), "command line")

    def facts(self, step: int) -> TrainerFacts:
        """Returns the inputs of this retraining at `step`, for a comparison with the recorded ones."""
        recorded, policy = self.run.facts(step), self.learner.policy
        plan = LearnerPlan(policy.source, None, self.settings, recorded.max_completion_length)
        return TrainerFacts.of(plan, policy.device, ranks=1, max_staleness=recorded.max_staleness)

    def _rebuild(self) -> None:
        """Continues with the settings of the next step, like a trainer that resumes from a checkpoint of this step."""
        checkpoint = self._last
        if checkpoint is None or checkpoint.step != self.step:
            checkpoint = self._save(self._progress(self.step))
        self._build(checkpoint, self.step)

    def _build(self, checkpoint: Checkpoint | None, step: int) -> None:
        """Loads the checkpoint after `step` steps, or the weights before any training."""
        settings, facts = self.settings_of(step + 1), self.run.facts(step + 1)
        _use_threads(facts)
        weights = None if checkpoint is None else str(checkpoint.path)
        plan = LearnerPlan(self.run.source(step + 1), weights, settings, facts.max_completion_length)
        # The memory may not have room for two learners.
        vars(self).pop("learner", None)
        vars(self).pop("state", None)
        self.learner, self.state = build_learner(plan, self._dist)
        if checkpoint is not None:
            self._store.restore(checkpoint, self.state)
        self.settings, self.step, self._last = settings, step, checkpoint

    def _save(self, progress: Progress) -> Checkpoint:
        self._last = self._store.save(self.state, progress)
        return self._last

    def _version(self, step: int) -> PolicyVersion:
        return PolicyVersion(self.run.record_of(step).progress.version.incarnation, step)

    def _progress(self, step: int) -> Progress:
        return Progress(step, self._version(step), creation=self._creation)


def off_policy(groups: list[TrajectoryGroup], samples: list[Sample], result: StepResult) -> OffPolicy | None:
    """Compares the policy before the step with the policies that sampled the step's completions.

    Returns None if no completion has trained tokens and log-probabilities of the server.
    """
    rewards = {group.group_id: group.rewards for group in groups}
    stats = result.token_stats
    log_weights: dict[int, float] = {}
    start = 0
    for number in result.order:
        end = start + samples[number].trained_tokens
        if samples[number].rollout_known and start < end:
            gap = stats.old_logprobs[start:end].astype(np.float64) - stats.rollout_logprobs[start:end]
            log_weights.setdefault(number, float(gap.sum()))
        start = end
    if not log_weights:
        return None
    known = [samples[number] for number in log_weights]
    rollouts = rollouts_of(known)
    logs = np.bincount(rollouts, list(log_weights.values()))
    weights = np.exp(logs - logs.max())
    firsts = [known[first] for first in np.unique(rollouts, return_index=True)[1]]
    scores = np.array([rewards[one.group_id][one.sequence] for one in firsts])
    return OffPolicy(
        effective_sample_size=float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        reward=float((weights * scores).sum() / weights.sum()),
    )


def changed(settings: Mapping[str, Any], recorded: TrainerSettings) -> dict[str, Any]:
    """Returns the values of `settings` that differ from the recorded ones. Raises ConfigError for a wrong value."""
    values = parse(Hyperparameters, settings, "command line").model_dump(include=set(settings))
    return {name: value for name, value in values.items() if value != getattr(recorded, name)}


def _use_threads(facts: TrainerFacts) -> None:
    """Uses the recorded number of threads, because sums over threads round differently with another number."""
    threads = int(facts.hardware.get("threads", torch.get_num_threads()))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
