"""A learner on the small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.trainer.learner.learning import Build

from gristmill_trainer.learner import Learner
from gristmill_trainer.optimizer import build_optimizer
from gristmill_trainer.out_of_memory import MemoryLimits
from gristmill_trainer.policy import Lora, ModelSource, Policy
from gristmill_trainer.settings import TrainerSettings


@pytest.fixture
def build(model_dir: Path) -> Build:
    """A learner on the small model, with these settings."""

    def learner(
        *,
        reference: Policy | None = None,
        plain: bool = False,
        limits: MemoryLimits | None = None,
        **settings: Any,
    ) -> Learner:
        """`plain`: plain steps along the gradient, which preserve its size. Adam's steps hide it."""
        defaults: dict[str, Any] = {"device": "cpu", "batch_size": 8, "learning_rate": 1e-3}
        chosen = TrainerSettings(**(defaults | settings | ({"learning_rate": 1.0} if plain else {})))
        source = ModelSource(str(model_dir), str(model_dir), None, 512)
        lora = Lora(chosen.lora_rank, chosen.lora_alpha) if chosen.lora_rank else None
        policy = Policy(source, "cpu", packing=chosen.packing, checkpointing=chosen.gradient_checkpointing, lora=lora)
        parameters = policy.trained_parameters()
        optimizer = torch.optim.SGD(parameters, lr=1.0) if plain else build_optimizer(chosen, parameters)
        return Learner(
            policy,
            optimizer,
            chosen,
            max_completion_length=16,
            limits=limits,
            reference=reference,
        )

    return learner
