"""The state of a training with one process, which holds the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gristmill_trainer.optimizer import load_schedule, own_settings
from gristmill_trainer.policy import Policy


class SingleProcess:
    """Saves and restores the policy, its optimizer and its learning rate schedule for checkpoints."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._schedule = schedule

    def served_tensors(self) -> dict[str, torch.Tensor]:
        return self._policy.served_tensors()

    def save_model(self, folder: Path) -> None:
        self._policy.save(folder)

    def save_whole(self, folder: Path) -> None:
        self._policy.save_whole(folder)

    def state(self) -> dict[str, Any]:
        schedule = None if self._schedule is None else self._schedule.state_dict()
        return {"optimizer": self._optimizer.state_dict(), "schedule": schedule}

    def load_state(self, state: dict[str, Any]) -> None:
        with own_settings(self._optimizer, keep="schedule" not in state):
            self._optimizer.load_state_dict(state["optimizer"])
        if self._schedule is not None and state.get("schedule") is not None:
            load_schedule(self._schedule, state["schedule"])
