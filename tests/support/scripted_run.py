"""The agreement between scripted environments and trainers. A group's content follows from its row, so a trainer that
leases the group can check whether it equals the submitted group."""

from __future__ import annotations

from typing import Any

from tests.support.groups import make_group

from gristmill import TrajectoryGroup

GROUP_SIZE = 2
GROUPS_PER_STEP = 4
ENV = {"dataset": "scripted"}


def plan(steps: int, groups_per_step: int = GROUPS_PER_STEP, staleness: int = 8) -> dict[str, Any]:
    """A trainer's half."""
    return {
        "batch_size": GROUP_SIZE * groups_per_step,
        "gradient_accumulation_steps": 1,
        "training_steps": steps,
        "max_staleness": staleness,
    }


def expected_group(run_id: str, group_id: str, env_id: str = "env-1") -> TrajectoryGroup:
    return make_group(group_id, run_id, lengths=((3, 40), (3, 25)), seed=int(group_id[1:]), env_id=env_id)
