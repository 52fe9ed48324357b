"""The trainer's settings: trainer.yaml < the run's `trainer:` block < the command line."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from gristmill_trainer.settings.advantages import AdvantageSettings
from gristmill_trainer.settings.batching import BatchingSettings
from gristmill_trainer.settings.compute import ComputeSettings
from gristmill_trainer.settings.life import LifeSettings
from gristmill_trainer.settings.objective import ObjectiveSettings
from gristmill_trainer.settings.optimizer import OptimizerSettings
from gristmill_trainer.settings.places import PlaceSettings
from gristmill_trainer.settings.tracking import TrackingSettings

__all__ = ["TrainerSettings"]


# Bases from last to first: places, the run's life, batches, advantages, objective, optimizer, memory, tracking.
class TrainerSettings(
    TrackingSettings,
    ComputeSettings,
    OptimizerSettings,
    ObjectiveSettings,
    AdvantageSettings,
    BatchingSettings,
    LifeSettings,
    PlaceSettings,
):
    """What one training does."""

    def record(self) -> dict[str, Any]:
        """The trainer's half of the run record: what must not change while the run lasts."""
        free = (PlaceSettings, ComputeSettings, TrackingSettings)
        return self.model_dump(
            exclude={name for group in free for name in group.model_fields} | {"resume", "stop_grace_seconds"}
        )

    @model_validator(mode="after")
    def _budget_holds_a_sequence(self) -> TrainerSettings:
        if self.token_budget is not None and self.seq_len is not None and self.token_budget < self.seq_len:
            raise ValueError(f"token_budget ({self.token_budget}) must hold one sequence of seq_len ({self.seq_len})")
        return self
