"""Who else is told the metrics."""

from __future__ import annotations

from gristmill.settings import Settings


class TrackingSettings(Settings):
    """Weights & Biases."""

    use_wandb: bool = False
    """The metrics go to Weights & Biases too; WANDB_MODE=offline keeps them here."""
    wandb_project: str | None = None
    """Its project. Default: gristmill."""
    wandb_name: str | None = None
    """The run's name there. Default: the run id."""
