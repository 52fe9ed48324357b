"""`gristmill retrain RUN`: trains a recorded run again, with the same settings or with others.

With the same settings each checkpoint has the same SHA-256 as in the original. With other settings the recorded
completions are off-policy data: the effective sample size of each step says how much of it still counts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gristmill import RunState
from gristmill.archive.run_file import write_run_file
from gristmill.internal.disk import write_file
from gristmill.internal.lines import JsonlWriter
from gristmill.internal.metrics import METRICS_FILE
from gristmill_trainer.metrics import step_metrics
from gristmill_trainer.replay.recorded import RecordedRun, ReplayError, check_step, differences
from gristmill_trainer.replay.retrainer import Change, Retrainer, TakenStep, changed, recorded_training

Say = Callable[[str], None]
"""Receives one line for a person."""
RETRAIN_FILE = "retrain.json"
"""A file in the folder of a retrained run: the recorded run, and the settings that differ."""
LOW_SAMPLE_SIZE = 0.5
"""Effective sample size, as a share of the completions, below which a step is reported as off-policy."""
LEAST_SAMPLE_SIZE = 0.1
"""Below this share the retraining stops, because a tenth of the completions decides the gradient."""


@dataclass(frozen=True)
class Request:
    """The arguments of a retraining."""

    settings: Mapping[str, Any]
    """Hyperparameters of the command line; those that equal the recorded ones change nothing."""
    at: int | None = None
    """Settings differ after this step. With the recorded settings, the retraining begins at the newest checkpoint on
    disk up to this step. None: the first step."""
    until: int | None = None
    """The last step; None: the last step with a checkpoint's record."""
    force: bool = False
    """Continue below `LEAST_SAMPLE_SIZE`."""


@dataclass
class Verdict:
    """The comparison of a retraining with the original."""

    compared: int = 0
    """Checkpoints that were compared, before the first that differs."""
    step: int | None = None
    """The first step whose checkpoint differs; None: all are equal."""
    files: list[str] = field(default_factory=list)
    """Files of that checkpoint whose bytes differ."""
    causes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Versions, hardware and model that differ, as (original, here), by name."""

    def add(self, taken: TakenStep, trainer: Retrainer) -> None:
        """Compares the checkpoint of a step, if the original has one and no earlier checkpoint differs."""
        files = None if self.step is not None else taken.differing_files()
        if files:
            self.step, self.files, self.causes = taken.step, files, _causes(trainer, taken.step)
        elif files is not None:
            self.compared += 1

    def report(self) -> list[str]:
        """Returns lines for a person."""
        if not self.compared and self.step is None:
            return ["no checkpoint is compared: the original has none after these steps"]
        if self.step is None:
            return [f"all {self.compared} checkpoints are equal, bit for bit"]
        lines = [f"the checkpoint of step {self.step} differs in {', '.join(self.files)}"]
        lines += [f"  {name}: {then} in the original, {now} here" for name, (then, now) in self.causes.items()]
        if not self.causes:
            lines.append("  model, settings, versions and hardware are the same as in the original")
        return lines


def verify(run: RecordedRun, request: Request, say: Say) -> Verdict:
    """Trains again with the recorded settings up to the first checkpoint that differs. Leaves no files.

    Raises ReplayError if the archive lacks groups, if the model is missing, or if no checkpoint is in the steps.
    """
    verdict = Verdict()
    with recorded_training(run) as trainer:
        for trained_step in _begun(trainer, request, say):
            verdict.add(trained_step, trainer)
            if verdict.step is not None:
                return verdict
            if trained_step.recorded is not None:
                say(f"step {trained_step.step}: the checkpoint is equal")
    if not verdict.compared:
        raise ReplayError(
            "nothing_compared",
            f"the steps contain no checkpoint; the run has checkpoints after steps "
            f"{', '.join(str(record.step) for record in run.checkpoints)}. Change --at or --until",
            run=run.run_id,
        )
    return verdict


def retrain(run: RecordedRun, request: Request, out: Path, say: Say) -> Verdict | None:
    """Trains again into the folder `out`, the folder of a new run. Returns the comparison if no setting differs.

    An earlier retraining of the same run in `out` is replaced. Raises ReplayError if `out` has anything else, if the
    archive lacks groups, or if the effective sample size of a step is too small.
    """
    after = request.at or 0
    _check_steps(run, request)
    change = Change(after, changed(request.settings, run.settings(after + 1)))
    _check_folder(out, run.run_id)
    with _replacing(out):
        trainer = Retrainer(run, out / "checkpoints", change)
        steps = _begun(trainer, request, say)
        run.batch(trainer.step + 1)
    _describe(out, run, request, change)
    verdict = Verdict()
    with JsonlWriter(out / METRICS_FILE) as metrics:
        for trained_step in steps:
            metrics.append(_row(trained_step, trainer))
            say(_line(trained_step))
            _check_sample_size(trained_step, change, request.force, say)
            verdict.add(trained_step, trainer)
    return verdict if change.is_empty else None


def _begun(trainer: Retrainer, request: Request, say: Say) -> Iterator[TakenStep]:
    """Begins the training and returns the iterator of its steps."""
    run = trainer.run
    at, until = request.at or 0, run.last_step if request.until is None else request.until
    _check_steps(run, request)
    begun = trainer.begin(at)
    source = trainer.learner.policy.source.weights if not begun else f"the checkpoint of step {begun}"
    say(f"begins with {source}; trains steps {begun + 1} to {until}")
    return trainer.steps(until)


def _check_steps(run: RecordedRun, request: Request) -> None:
    at = request.at or 0
    check_step("--at", at, 0, run.last_step - 1)
    if request.until is not None:
        check_step("--until", request.until, at + 1, run.last_step)


def _causes(trainer: Retrainer, step: int) -> dict[str, tuple[Any, Any]]:
    then, now = trainer.run.facts(step), trainer.facts(step)
    causes = differences(then.software, now.software) | differences(then.hardware, now.hardware)
    if then.model_sha256 != now.model_sha256:
        causes["model"] = (f"{then.model} ({then.model_sha256})", f"{now.model} ({now.model_sha256})")
    return causes


def _check_sample_size(taken: TakenStep, change: Change, force: bool, say: Say) -> None:
    """Warns of a small effective sample size, and raises ReplayError for a smaller one."""
    if change.is_empty or taken.step <= change.after or taken.off_policy is None:
        return
    size = taken.off_policy.effective_sample_size
    if size < LEAST_SAMPLE_SIZE and not force:
        raise ReplayError(
            "sample_size_too_small",
            f"step {taken.step}: the effective sample size is {size:.1%} of the completions, below "
            f"{LEAST_SAMPLE_SIZE:.0%}. The recorded completions do not represent this policy any more. End before: "
            f"--until {taken.step - 1}; or continue: --force",
            step=taken.step,
            effective_sample_size=size,
        )
    if size < LOW_SAMPLE_SIZE:
        say(f"warning: step {taken.step} is off-policy: {size:.0%} of its completions count (effective sample size)")


def _row(taken: TakenStep, trainer: Retrainer) -> dict[str, Any]:
    device = trainer.learner.policy.device
    metrics = step_metrics(taken.version, taken.prepared.statistics, taken.result, {}, device=device)
    row = {"step": taken.step, **metrics.values()}
    if taken.off_policy is not None:
        row["effective_sample_size"] = taken.off_policy.effective_sample_size
        row["reward_estimate"] = taken.off_policy.reward
    return row


def _line(taken: TakenStep) -> str:
    result = taken.result
    text = f"step {taken.step}: loss {result.loss:.4g}, grad_norm {result.grad_norm:.4g}"
    if taken.off_policy is not None:
        text += f", effective sample size {taken.off_policy.effective_sample_size:.1%}"
    files = taken.differing_files()
    if files is None:
        return text
    return text + (f", checkpoint differs in {', '.join(files)}" if files else ", checkpoint equal")


def _check_folder(out: Path, run_id: str) -> None:
    """Raises ReplayError if the folder has anything but an earlier retraining of the run."""
    if not out.exists():
        return
    file = out / RETRAIN_FILE
    try:
        of_run = msgspec.json.decode(file.read_bytes(), type=dict[str, Any]).get("run")
    except (OSError, ValueError):
        of_run = None
    if of_run != run_id:
        raise ReplayError(
            "folder_taken",
            f"{out} exists and is not a retraining of run {run_id}; name another run id: --out NAME",
            folder=out,
        )


@contextmanager
def _replacing(out: Path) -> Iterator[None]:
    """Removes an earlier retraining in `out` after the block, or puts it back if the block fails."""
    earlier = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(earlier, ignore_errors=True)
    if out.exists():
        out.rename(earlier)
    try:
        yield
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        if earlier.exists():
            earlier.rename(out)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def _describe(out: Path, run: RecordedRun, request: Request, change: Change) -> None:
    """Writes run.json, from which the page has the settings, and retrain.json."""
    out.mkdir(parents=True, exist_ok=True)
    about = {"run": run.run_id, "at": change.after, "until": request.until, "settings": dict(change.settings)}
    write_file(out / RETRAIN_FILE, f"{json.dumps(about, indent=2)}\n".encode())
    record = run.folder.record()
    if record is not None:
        trainer = {**(record.trainer or {}), **change.settings}
        retrained = record.model_copy(update={"run_id": out.name, "state": RunState.FINISHED, "trainer": trainer})
        write_run_file(out, retrained)
