"""What the API tells about a run."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class RunState(StrEnum):
    """A run is open until its trainer has done `training_steps`."""

    OPEN = "open"
    FINISHED = "finished"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class RunRecord(_Record):
    """One run: the environment's half, the trainer's half, and where it stands."""

    run_id: str
    state: RunState
    digest: str
    """SHA-256 of the environment's half."""
    group_size: int
    env: dict[str, Any]
    trainer: dict[str, Any] | None = None
    """None until a trainer took the run."""
    incarnation: int = 0
    """How many times a trainer has taken the run."""
    version: str | None = None
    """The newest published policy version ("1.20")."""
    groups_per_step: int | None = None
    training_steps: int | None = None
    max_staleness: int | None = None
    created_at: float
    """Unix time, seconds."""


class Permit(_Record):
    """Leave to generate one group: for dataset row `row`, to be submitted as `group_id`."""

    group_id: str
    row: int


class PermitGrant(_Record):
    """Answer to a request for permits; empty when none came free in time."""

    permits: list[Permit]
    state: RunState
    version: str | None = None


class RunStatus(_Record):
    """Counts of a run. Groups: ready + leased + trained + dead + Σ dropped = all that were ever stored or given up."""

    state: RunState
    version: str | None = None
    ready: int
    leased: int
    trained: int
    dead: int
    accepted: int
    """Groups submitted and not dropped since."""
    outstanding: int
    """Permits out with environments."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Groups given up, by reason."""
    rows_issued: int
    bytes: int
    """Payload bytes held."""


class GroupAudit(_Record):
    """Every group id of a run, by where it is. For audits and tests; its cost grows with the run."""

    trained: list[str]
    ready: list[str]
    leased: list[str]
    dead: list[str]
    dropped: dict[str, str]
    """Group id to reason."""
    outstanding: list[str]
