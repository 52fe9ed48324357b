"""Replaces a trajectory API with one in this process that fails on request, or that counts reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from gristmill import ApiError, PolicyVersion, RunRecord, RunState, SyncClient, TrajectoryGroup


class ApiStandIn:
    """Leases the given groups in their order, two per step, and keeps the acked groups."""

    def __init__(self, groups: Sequence[TrajectoryGroup] = ()) -> None:
        self.incarnation = 0
        self.ready = list(groups)
        self.leased: dict[str, list[TrajectoryGroup]] = {}
        self.acked: list[str] = []
        self.versions: list[str] = []
        self.rows: list[int] = []
        self.values: list[Mapping[str, Any]] = []
        """Of each row."""
        self.finished = False
        self.error: Exception | None = None
        """Raised instead of an answer."""
        self.refusal: ApiError | None = None
        """Raised when the trainer reports metrics."""

    @property
    def client(self) -> SyncClient:
        return cast("SyncClient", self)

    def take(
        self, run_id: str, trainer: Mapping[str, Any], covered: Sequence[str], step: int | None, creation: str | None
    ) -> tuple[int, RunRecord]:
        self._answer()
        self.incarnation += 1
        record = RunRecord(
            run_id=run_id,
            state=RunState.OPEN,
            digest="",
            group_size=2,
            env={},
            created_at=0.0,
            creation=creation or "",
            incarnation=self.incarnation,
            groups_per_step=2,
        )
        return self.incarnation, record

    def lease(
        self, run_id: str, incarnation: int, batch_id: str, groups: int, sequences: None, wait: float, **named: Any
    ) -> list[TrajectoryGroup] | None:
        self._answer()
        if len(self.ready) < groups:
            return None
        self.leased[batch_id], self.ready = self.ready[:groups], self.ready[groups:]
        return self.leased[batch_id]

    def extend(self, run_id: str, incarnation: int, batch_ids: Sequence[str], **named: Any) -> list[str]:
        self._answer()
        return []

    def ack(self, run_id: str, incarnation: int, batch_ids: Sequence[str], **named: Any) -> None:
        self._answer()
        self.acked += [group.group_id for batch_id in batch_ids for group in self.leased.pop(batch_id)]

    def nack(self, run_id: str, incarnation: int, batch_ids: Sequence[str], **named: Any) -> int:
        self._answer()
        back = [group for batch_id in batch_ids for group in self.leased.pop(batch_id)]
        self.ready = back + self.ready
        return len(back)

    def record_version(self, run_id: str, version: PolicyVersion, **named: Any) -> None:
        self._answer()
        self.versions.append(str(version))

    def report_metrics(self, run_id: str, source: str, step: int, values: Mapping[str, Any], **named: Any) -> None:
        self._answer()
        if self.refusal is not None:
            raise self.refusal
        self.rows.append(step)
        self.values.append(values)

    def finish(self, run_id: str, incarnation: int, **named: Any) -> None:
        self._answer()
        self.finished = True

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error
