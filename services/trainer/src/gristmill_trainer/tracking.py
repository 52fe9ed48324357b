"""The trainer's metrics on Weights & Biases, when asked."""

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
    """A W&B run beside the environments', in the group named after the run. The x axis is `policy_step`."""

    def __init__(self, run_id: str, settings: TrainerSettings, folder: Path, environ: Mapping[str, str]) -> None:
        """`folder`: the run's own. Errors of W&B are logged and counted. Raises ConfigError: a setting is wrong."""
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
        """Log a step's numbers as train/NAME, those of a dict as train/NAME/KEY."""
        if self._run is not None:
            with self.errors.of(_WANDB):
                self._run.log({"policy_step": metrics.step, **dict(_flat("train", metrics.values()))})

    def close(self) -> None:
        """Flush, and close the run."""
        if self._run is not None:
            with self.errors.of(_WANDB):
                self._run.finish()
        self.errors.report()


def _flat(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in _flat(f"{name}/{key}", inner)]
    return [(name, float(value))] if isinstance(value, int | float) else []
