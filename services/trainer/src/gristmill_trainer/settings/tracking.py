"""Who else is told the metrics."""

from __future__ import annotations

from gristmill.settings import Settings


class TrackingSettings(Settings):
    """Weights & Biases, and a function of one's own."""

    use_wandb: bool = False
    """The metrics go to Weights & Biases too; WANDB_MODE=offline keeps them here."""
    wandb_project: str | None = None
    """Its project. Default: gristmill."""
    wandb_name: str | None = None
    """The run's name there. Default: the run id."""
    on_step: str | None = None
    """A function that is called after every step, as path/to/file.py:function or package.module:function; it gets a
    gristmill_trainer.hooks.StepEvent. Not after the step in which the trainer is asked to stop."""
