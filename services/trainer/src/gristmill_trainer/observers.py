"""The observers that get the metrics of each step: W&B, TensorBoard, Prometheus. Their errors never end a training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from gristmill.internal.metrics import StepMetrics
from gristmill.internal.tracking import ObserverErrors, start_wandb
from gristmill_trainer.prometheus import StepCollector
from gristmill_trainer.settings import TrainerSettings

TENSORBOARD_FOLDER = "tensorboard"


class Observer(Protocol):
    """Receives the metrics of every step."""

    def step(self, metrics: StepMetrics) -> None:
        """Records a step."""

    def close(self) -> None:
        """Flushes."""


class Observers:
    """All observers of a training as one. An error of an observer is logged and counted, and the training continues."""

    def __init__(self) -> None:
        self.errors = ObserverErrors()
        self._opened: list[tuple[str, Observer]] = []

    def open(self, name: str, factory: Callable[[], Observer]) -> None:
        """Adds the observer that `factory` opens. An observer that does not open is omitted.

        Raises ConfigError when a setting of the observer is wrong.
        """
        with self.errors.of(name):
            self._opened.append((name, factory()))

    def step(self, metrics: StepMetrics) -> None:
        """Passes the metrics of a step to every observer."""
        for name, observer in self._opened:
            with self.errors.of(name):
                observer.step(metrics)

    def close(self) -> None:
        """Flushes and closes every observer, and logs how many errors each observer had."""
        for name, observer in self._opened:
            with self.errors.of(name):
                observer.close()
        self.errors.report()


def open_observers(
    run_id: str,
    settings: TrainerSettings,
    folder: Path,
    first_step: int,
    environ: Mapping[str, str],
    registry: CollectorRegistry | None,
) -> Observers:
    """Opens the observers that the settings name. `folder`: the run's. `first_step`: steps done before this process.

    `registry`: the metrics for Prometheus; None if they are not served. Raises ConfigError for a wrong setting.
    """
    observers = Observers()
    if settings.use_wandb:
        observers.open("W&B", partial(WandbTracker, run_id, settings, folder, environ))
    if settings.tensorboard:
        observers.open("TensorBoard", partial(TensorBoardTracker, folder / TENSORBOARD_FOLDER, first_step))
    if registry is not None:
        steps = settings.training_steps
        observers.open(
            "Prometheus", lambda: StepCollector(run_id, steps, first_step, observers.errors).register(registry)
        )
    return observers


class WandbTracker:
    """The trainer's W&B run, in the same group as the environments' W&B runs. The x axis is `policy_step`.

    The group has the name of the run.
    """

    def __init__(self, run_id: str, settings: TrainerSettings, folder: Path, environ: Mapping[str, str]) -> None:
        """`folder`: the run's folder. Raises ConfigError for a wrong setting."""
        self._run = start_wandb(
            run_id,
            "trainer",
            settings.model_dump(mode="json"),
            folder,
            environ,
            name=settings.wandb_name,
            project=settings.wandb_project,
        )
        self._run.define_metric("policy_step")
        self._run.define_metric("*", step_metric="policy_step")

    def step(self, metrics: StepMetrics) -> None:
        """Logs a step's numbers as train/NAME, and the values of a dict as train/NAME/KEY."""
        self._run.log({"policy_step": metrics.step, **numbers("train", metrics.values())})

    def close(self) -> None:
        """Flushes and closes the W&B run."""
        self._run.finish()


class TensorBoardTracker:
    """Writes event files of TensorBoard, with the names that W&B gets.

    Each step is in the file when `step` returns. (The writer of tensorboardX that users know writes in a thread. If
    the disk is full, that thread ends, and the training would wait for it forever.)
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        """`first_step`: TensorBoard leaves out later steps of earlier files, which a resumed training repeats."""
        from tensorboardX.event_file_writer import EventsWriter  # most runs do not use it
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), filename_suffix=f".{os.getpid()}")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(first_step + 1, session_log=start)

    def step(self, metrics: StepMetrics) -> None:
        """Writes a step's numbers."""
        found = numbers("train", metrics.values())
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in found.items()]
        self._write(metrics.step, summary=self._summary(value=values))

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))
        self._writer.flush()


def numbers(name: str, value: Any) -> dict[str, float]:
    """Returns the numbers in `value` by name: NAME/KEY for the values of a mapping. Leaves out text."""
    if isinstance(value, Mapping):
        flat: dict[str, float] = {}
        for key, item in value.items():
            flat |= numbers(f"{name}/{key}", item)
        return flat
    return {name: float(value)} if isinstance(value, int | float) else {}
