"""The trainer's metrics on Weights & Biases, if enabled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.metrics import StepMetrics
from gristmill.observers import ObserverErrors
from gristmill.wandb_run import start_wandb
from gristmill_trainer.settings import TrainerSettings

_WANDB = "W&B"


class WandbTracker:
    """The trainer's W&B run, in the same group as the environments' W&B runs. The x axis is `policy_step`.

    The group has the name of the run.
    """

    def __init__(self, run_id: str, settings: TrainerSettings, folder: Path, environ: Mapping[str, str]) -> None:
        """`folder`: the run's folder. Errors of W&B are logged and counted. Raises ConfigError for a wrong setting."""
        self.errors = ObserverErrors()
        self._run: Any = None
        with self.errors.of(_WANDB):
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
        if self._run is not None:
            with self.errors.of(_WANDB):
                self._run.log({"policy_step": metrics.step, **dict(_flat("train", metrics.values()))})

    def close(self) -> None:
        """Flushes and closes the W&B run."""
        if self._run is not None:
            with self.errors.of(_WANDB):
                self._run.finish()
        self.errors.report()


def _flat(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in _flat(f"{name}/{key}", inner)]
    return [(name, float(value))] if isinstance(value, int | float) else []
