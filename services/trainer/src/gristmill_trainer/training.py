"""The objects of a training in progress: `Training` on every rank, and `MainRank` on rank 0. startup.py makes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from gristmill import ApiError, ErrorCode, LeaseSession, PolicyVersion
from gristmill.internal.lines import JsonlWriter
from gristmill.internal.metrics import MAX_TEXT, METRICS_FILE, StepMetrics
from gristmill.internal.stall import StallGuard
from gristmill_trainer.batch_source import Batch, BatchSource
from gristmill_trainer.checkpoint.background import BackgroundSave
from gristmill_trainer.checkpoint.contents import Progress
from gristmill_trainer.checkpoint.digests import DigestWriter
from gristmill_trainer.checkpoint.store import CheckpointStore
from gristmill_trainer.data.samples import Statistics
from gristmill_trainer.disk import writing
from gristmill_trainer.display import Display
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.export import Hub, RunFacts
from gristmill_trainer.hooks import Hook
from gristmill_trainer.learner import Learner
from gristmill_trainer.metrics import StepResult
from gristmill_trainer.model_state import LearnerState
from gristmill_trainer.observers import Observers
from gristmill_trainer.publish.publisher import Publisher
from gristmill_trainer.publish.servers import ModelServer
from gristmill_trainer.quarantine import SkippedSteps, SkipRecord, quarantine
from gristmill_trainer.receipts.probes import Probes
from gristmill_trainer.receipts.receipts import Receipts
from gristmill_trainer.records import TrainedRecords
from gristmill_trainer.settings import TrainerSettings
from gristmill_trainer.stop import StopRequest
from gristmill_trainer.watchdog import Watchdog

_LOG = logging.getLogger(__name__)
_REFUSALS = (ErrorCode.BAD_REQUEST, ErrorCode.TOO_LARGE, ErrorCode.TOO_MANY_SOURCES)
"""Of a row of metrics, for what it contains or for its source."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass
class Phases:
    """Wall time by phase since the metrics of the previous step, with its checkpoint and publication."""

    guard: StallGuard | None
    """None except on rank 0, because the other ranks wait for rank 0 without a time limit."""
    seconds: dict[str, float] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase in the step that took longest for it."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        self.progress()
        yield
        self.progress()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
        self.slowest[name] = max(self.slowest.get(name, 0.0), self.seconds[name])

    def progress(self) -> None:
        if self.guard is not None:
            self.guard.progress()

    def take(self) -> dict[str, float]:
        """Returns the seconds by phase, and starts to measure the next step."""
        taken, self.seconds = self.seconds, {}
        return taken


@dataclass
class Batches:
    """The batches of the steps, on rank 0."""

    source: BatchSource
    watchdog: Watchdog
    """Reports what a wait for a batch takes so long for."""
    step: int = 0
    """The step that waits for its batch, or that has it."""
    current: Batch | None = None
    """Its batch; None while the step waits."""

    @property
    def leased(self) -> Batch:
        assert self.current is not None
        return self.current


@dataclass
class Ledger:
    """Which groups each step used up, for the next checkpoint and its ack."""

    session: LeaseSession
    digests: DigestWriter
    aside: Path
    """Folder of the quarantined groups."""
    skipped: SkippedSteps
    origin: str | None
    """The checkpoint that `resume` named, or None."""
    model_sha256: str | None = None
    """`ModelSource.sha256`."""

    def trained(self, batch: Batch, result: StepResult) -> None:
        """Records the outcome of the step's groups. Quarantines them if nothing was trained or an update left out."""
        self.session.trained(batch.step)
        ids = [group.group_id for group in batch.groups]
        self.digests.trained(batch.step, ids)
        problem = result.skipped or result.problem
        if problem is None:
            self.skipped.trained()
            return
        record = SkipRecord(
            step=batch.step,
            version=str(self.session.version(batch.step - 1)),
            problem=problem,
            loss=str(result.loss),
            grad_norm=str(result.grad_norm),
            group_ids=ids,
        )
        self.skipped.skipped(quarantine(self.aside, batch.groups, record), problem)

    def progress(self, step: int) -> Progress:
        return Progress(
            step=step,
            version=self.session.version(step),
            last_batch=self.session.batch_id(step),
            covered=self.session.covered,
            skipped=list(self.skipped.files),
            origin=self.origin,
            creation=self.session.run.creation,
            model_sha256=self.model_sha256,
        )


@dataclass
class Reports:
    """Where the metrics of each step go: metrics.jsonl, the API, the display and the observers."""

    session: LeaseSession
    folder: Path
    """The run's."""
    file: JsonlWriter
    """metrics.jsonl."""
    display: Display
    observers: Observers
    measure: Callable[[PolicyVersion, Statistics, StepResult, dict[str, float]], StepMetrics]
    """`step_metrics` with the properties of the devices."""
    records: TrainedRecords | None = None
    """None: `record_rollouts` is off."""
    last: StepMetrics | None = None

    def step(
        self, batch: Batch, result: StepResult, seconds: dict[str, float], receipts: Mapping[str, Any]
    ) -> StepMetrics:
        """Reports a step. `seconds`: by phase. `receipts`: fields of StepMetrics.

        If the API refuses the row, as for an invalid metric name, this method logs a warning. The row is then only
        missing in the API. The API gets the beginning of a text that is longer than it takes.
        """
        version, prepared = self.session.version(batch.step), batch.prepared
        metrics = self.measure(version, prepared.statistics, result, seconds)
        self.last = metrics = msgspec.structs.replace(metrics, **receipts)
        values = metrics.values()
        with writing(self.folder / METRICS_FILE):
            self.file.append({"step": batch.step, **values})
        try:
            short = {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in values.items()}
            self.session.report_metrics(batch.step, short)
        except ApiError as error:
            if error.code not in _REFUSALS:
                raise
            _LOG.warning("the API takes no metrics of step %d, which are in the run's folder: %s", batch.step, error)
        if self.records is not None:
            self.records.add(version, prepared, result)
        self.display.step(metrics)
        self.observers.step(metrics)
        return metrics


@dataclass(frozen=True)
class Finish:
    """What the finished model gets: a card, and a place in the hub."""

    facts: RunFacts
    """Without the final version, reward and receipts."""
    hub: Hub | None


@dataclass
class MainRank:
    """All objects that the loop uses on rank 0 only."""

    session: LeaseSession
    batches: Batches
    ledger: Ledger
    saving: BackgroundSave
    """Idle with several processes."""
    reports: Reports
    publisher: Publisher
    receipts: Receipts | None
    """None: this trainer publishes no weights."""
    servers: Iterable[ModelServer]
    hook: Hook | None
    finish: Finish
    stop: StopRequest
    guard: StallGuard
    noticing_replacement: Callable[[], AbstractContextManager[None]]
    """Converts an error to FencedError if another trainer has taken the run."""

    @property
    def is_ending(self) -> bool:
        """Whether the training ends after this step, by a stop request or by too many skipped steps."""
        return self.stop.requested or self.ledger.skipped.too_many


@dataclass
class Training:
    """All objects that the loop uses on every rank; startup.py creates them."""

    settings: TrainerSettings
    dist: DistContext
    learner: Learner
    state: LearnerState
    checkpoints: CheckpointStore
    phases: Phases
    first_step: int
    """Optimizer steps done before the resumed checkpoint."""
    run_dir: Path
    main: MainRank | None
    """None except on rank 0."""
    servers_sleep: bool = False
    """Whether the model servers sleep during a step."""
    probes: Probes | None = None
    """Of the receipts, the same on every rank. None until the first batch of a run, and without publications."""

    def on_main(self, call: Callable[Concatenate[MainRank, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Returns the result of `call(main, ...)` on every rank, although only rank 0 executes it.

        A stop request (StoppedError), another trainer of the run (FencedError) and a suspended run (ApiError) are
        raised on every rank. After any other error of rank 0, the other ranks raise RankLostError.
        """

        def called() -> _T:
            assert self.main is not None
            with self.main.noticing_replacement(), self.main.stop.stop_on_timeout():
                return call(self.main, *args, **kwargs)

        return self.dist.on_main(called)
