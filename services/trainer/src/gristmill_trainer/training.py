"""The objects of a training in progress: `Training` on every rank, and `MainRank` on rank 0. startup.py makes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch

from gristmill import LeaseSession, PolicyVersion
from gristmill.lines import JsonlWriter
from gristmill.stall import StallGuard
from gristmill_trainer.batch_source import Batch, BatchSource
from gristmill_trainer.checkpoint import BackgroundSave, CheckpointStore
from gristmill_trainer.checkpoint.digests import DigestWriter
from gristmill_trainer.display import Display
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.export import Hub, RunFacts
from gristmill_trainer.hooks import Hook
from gristmill_trainer.learner import Learner
from gristmill_trainer.model_state import LearnerState
from gristmill_trainer.observers import Observers
from gristmill_trainer.publish import ModelServer, Publisher
from gristmill_trainer.quarantine import Quarantine, SkippedSteps
from gristmill_trainer.receipts import Probes, Receipts
from gristmill_trainer.records import TrainedRecords
from gristmill_trainer.settings import TrainerSettings
from gristmill_trainer.stop import StopRequest
from gristmill_trainer.watchdog import Watchdog

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
class MainRank:
    """All objects that the loop uses on rank 0 only."""

    session: LeaseSession
    publisher: Publisher
    batches: BatchSource
    quarantine: Quarantine
    skipped: SkippedSteps
    watchdog: Watchdog
    guard: StallGuard
    metrics: JsonlWriter
    digests: DigestWriter
    observers: Observers
    hook: Hook | None
    servers: Iterable[ModelServer]
    display: Display
    stop: StopRequest
    noticing_replacement: Callable[[], AbstractContextManager[None]]
    """Converts an error to FencedError if another trainer has taken the run."""
    origin: str | None
    """The checkpoint that `resume` named, or None."""
    facts: RunFacts
    """Facts for the card of the finished model. `final_facts` adds the final version and reward."""
    hub: Hub | None
    device: torch.device
    devices: int
    peak_tflops: float | None
    records: TrainedRecords | None = None
    """None: `record_rollouts` is off."""
    receipts: Receipts | None = None
    """None: this trainer publishes no weights."""
    batch: Batch | None = None
    """The batch of the current step."""

    def version(self, step: int) -> PolicyVersion:
        """Returns the version of the weights after `step` steps."""
        return PolicyVersion(self.session.incarnation, step)


@dataclass
class Probing:
    """The probes of the receipts, the same on every rank."""

    probes: Probes | None = None
    """None until the first batch of a run."""


@dataclass(frozen=True)
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
    probing: Probing | None = None
    """None: this trainer publishes no weights."""
    saving: BackgroundSave = field(default_factory=BackgroundSave)
    """Idle except on rank 0 of one process."""

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
