"""A training of a few steps, assembled as the trainer does it, for any number of processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from tests.support.errors import raises

from gristmill import PolicyVersion
from gristmill_trainer.checkpoint.contents import Progress
from gristmill_trainer.checkpoint.store import CheckpointStore
from gristmill_trainer.data.samples import Prepared, Statistics
from gristmill_trainer.data.types import Sample
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import AbandonedError
from gristmill_trainer.learner import Learner
from gristmill_trainer.learner_factory import LearnerPlan, build_learner
from gristmill_trainer.metrics import StepResult, measure
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.records import trained_groups
from gristmill_trainer.settings import TrainerSettings

STEPS = 3
RESUMED = 2
"""The step from whose checkpoint the other number of processes continues."""
_BASE: dict[str, Any] = {
    "device": "cpu", "batch_size": 2, "training_steps": 8, "learning_rate": 1e-3, "warmup_steps": 1,
    "lr_schedule": "linear", "weight_decay": 0.1, "max_grad_norm": 0.5,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    # 7 samples are 4 micro-batches; 5 are 3, and the second rank has none in the second round.
    "plain": _BASE,
    "passes": _BASE | {"objective": "grpo", "num_epochs": 2, "minibatches": 2},
    "penalties": _BASE | {"kl_beta": 0.2, "entropy_coef": 0.05, "kl_estimator": "k2"},
    "passes with penalties": _BASE
    | {"objective": "gspo", "num_epochs": 2, "minibatches": 3, "kl_beta": 0.2, "entropy_coef": 0.05},
    "checkpointed": _BASE | {"objective": "bnpo", "gradient_checkpointing": True, "token_budget": 32},
    # Two groups fit the budget because their prompts count once.
    "shared prompts": _BASE | {"objective": "grpo", "token_budget": 100, "max_grad_norm": 100.0},
    "padded": _BASE | {"objective": "cispo", "packing": False, "max_grad_norm": 100.0},
    # Its parameters have no gradient, and no state in the optimizer.
    "image tower": _BASE,
    # One padded micro-batch: the second rank never has any.
    "alone": _BASE | {"packing": False, "batch_size": 16, "entropy_coef": 0.05, "kl_beta": 0.1},
}
GIVEN_UP = ("plain", "penalties")
"""Their second step is started, abandoned after a micro-batch, and started again."""


@dataclass(frozen=True)
class Job:
    """One training, whose files are in `folder`."""

    settings: str
    """A name of SETTINGS."""
    model: Path
    folder: Path
    resume: Path | None = None
    """A checkpoint of step RESUMED; training continues with the step after it."""

    @property
    def plan(self) -> LearnerPlan:
        source = ModelSource(str(self.model), str(self.model), None, 512)
        weights = None if self.resume is None else str(self.resume)
        return LearnerPlan(source, weights, TrainerSettings(**SETTINGS[self.settings]), None)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / f"step-{RESUMED:06d}"


def samples(step: int, shared: int = 0) -> list[Sample]:
    """Sequences of different lengths; some with unknown rollout log-probabilities, one without a trained token. The
    first two are branches of one rollout. Each group begins with its own `shared` tokens."""
    rng = np.random.default_rng(step)
    found = []
    for number in range(7 if step % 2 else 5):
        prompt, completion = shared + int(rng.integers(2, 6)), int(rng.integers(1, 12))
        trained = np.arange(prompt + completion) >= prompt
        if number == 3:
            trained[:] = False
        logprobs = np.where(trained, -4 + 0.3 * rng.normal(size=len(trained)), 0).astype(np.float32)
        known = number != 2
        tokens = rng.integers(0, 64, len(trained), dtype=np.int32)
        tokens[:shared] = np.random.default_rng([step, number // 2]).integers(0, 64, shared)
        found.append(
            Sample(
                group_id=f"g{number // 2}",
                tokens=tokens,
                trained=trained,
                rollout_logprobs=logprobs if known else np.where(trained, np.nan, 0).astype(np.float32),
                advantages=np.where(trained, rng.normal(), 0).astype(np.float32),
                temperature=0.9,
                rollout_known=known,
                rollout=0 if number < 2 else None,
            )
        )
    return found


def run(job: Job, dist: DistContext) -> None:
    """Trains, on every rank. Writes steps.json (one row per step), a checkpoint, served.safetensors and whole/."""
    learner, state = build_learner(job.plan, dist)
    store = dist.on_main(lambda: CheckpointStore(job.folder / "checkpoints", kept=5))
    resume = job.resume
    if resume is not None:
        store.restore(dist.on_main(lambda: store.load(resume)), state)
    else:  # A checkpoint before the first update, which counts no update.
        state.load_state(state.state())
    step_rows = []
    for step in range(RESUMED + 1 if job.resume else 1, STEPS + 1):
        step_rows.append(_step(job, learner, step))
        if step == RESUMED:
            store.save(state, Progress(step, PolicyVersion(1, step)))
    served = learner.policy.served_tensors()
    learner.policy.save_whole(job.folder / "whole")
    if dist.is_main:
        (job.folder / "steps.json").write_text(json.dumps(step_rows))
        save_file(served, job.folder / "served.safetensors")


def _step(job: Job, learner: Learner, step: int) -> dict[str, Any]:
    batch = samples(step, shared=30 if job.settings == "shared prompts" else 0)
    if job.settings in GIVEN_UP and step == RESUMED:
        _give_up(learner, batch, step)
    result = learner.step(batch, step)
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "counts": [result.tokens, result.trained_tokens, result.flops],
        "measures": asdict(measure(result.token_stats)),
        "records": _records(batch, result),
    }


def _records(batch: list[Sample], result: StepResult) -> dict[str, list[float]]:
    """Returns the log-probabilities that the trainer records, by sequence."""
    numbered = [replace(sample, sequence=number) for number, sample in enumerate(batch)]
    groups = trained_groups(PolicyVersion(1, 1), Prepared(numbered, [], Statistics.of_groups([])), result)
    return {
        f"{group.group_id}.{index}": [] if sequence.logprobs is None else sequence.logprobs.tolist()
        for group in groups
        for index, sequence in group.sequences.items()
    }


def _give_up(learner: Learner, batch: list[Sample], step: int) -> None:
    answers: Iterator[bool] = iter([True])
    with raises(AbandonedError, "step_abandoned") as abandoned:
        learner.step(batch, step, lambda: next(answers, False))
    assert abandoned.value.untouched
