"""What cannot be trained is refused before a model is loaded."""

from __future__ import annotations

import pytest

from gristmill_trainer.build import LearnerPlan, build_crew
from gristmill_trainer.distributed.world import World
from gristmill_trainer.errors import TrainerError
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.settings import TrainerSettings


def test_dr_grpo_needs_a_longest_completion() -> None:
    """Environments of Atropos' do not tell theirs."""
    plan = LearnerPlan(ModelSource.of("nowhere"), None, TrainerSettings(objective="dr_grpo"), None)
    with pytest.raises(TrainerError, match="set max_completion_length"):
        build_crew(plan, World())
