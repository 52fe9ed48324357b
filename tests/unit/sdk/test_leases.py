"""The requests that a trainer's session sends to the API."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any, cast

import httpx
import pytest
from tests.support.errors import raises
from tests.support.groups import make_group

from gristmill import (
    ApiError,
    ErrorCode,
    LeaseSession,
    PolicyVersion,
    RunRecord,
    RunState,
    SyncClient,
    TrajectoryGroup,
    leases,
)

RECORD = RunRecord(
    run_id="sums",
    state=RunState.OPEN,
    digest="",
    group_size=2,
    env={},
    created_at=0.0,
    incarnation=1,
    creation="c0ffee",
)


class Api:
    """Replaces a client of a run, and keeps what a session sends."""

    def __init__(self) -> None:
        self.versions: list[PolicyVersion] = []
        self.acked: list[str] = []
        self.refusals: list[ErrorCode] = []
        """The codes of the next calls of `take`."""

    @property
    def client(self) -> SyncClient:
        return cast("SyncClient", self)

    def take(self, *arguments: Any) -> tuple[int, RunRecord]:
        if self.refusals:
            raise ApiError(self.refusals.pop(0), 404, "refused")
        return RECORD.incarnation, RECORD

    def record_version(self, run_id: str, version: PolicyVersion, **named: Any) -> None:
        self.versions.append(version)

    def lease(self, run_id: str, incarnation: int, batch_id: str, **named: Any) -> list[TrajectoryGroup]:
        return [make_group(batch_id)]

    def ack(self, run_id: str, incarnation: int, batch_ids: Sequence[str], **named: Any) -> None:
        self.acked += batch_ids


class SilentApi(Api):
    """Does not answer the return of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def nack(self, run_id: str, incarnation: int, batch_ids: Sequence[str], **named: Any) -> int:
        self.answers.wait()
        return 0


def test_end_of_a_session_does_not_wait_for_an_api_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_GOODBYE", 0.05)
    api = SilentApi()
    with LeaseSession(api.client, "sums", {}) as session:
        assert session.lease(1, wait=0)
    assert not api.answers.is_set()
    api.answers.set()


def test_session_acks_the_batches_up_to_a_checkpoints_step() -> None:
    """The trainer wrote the checkpoint of step 10 while it trained step 11."""
    api = Api()
    with LeaseSession(api.client, "sums", {}) as session:
        for step in (9, 10, 11):
            session.lease(step, 0.0, 1)
            session.trained(step)
        session.ack(8)
        assert api.acked == []
        session.ack(10)
        assert (api.acked, session.covered) == (["1.9", "1.10"], ["1.11"])
        session.ack()
        assert (api.acked, session.covered) == (["1.9", "1.10", "1.11"], [])
        api.acked.clear()
        session.ack(11)
    assert api.acked == []


def test_session_records_a_version_its_label_or_a_step() -> None:
    api = Api()
    with LeaseSession(api.client, "sums", {}) as session:
        assert session.version(20) == PolicyVersion(1, 20)
        for version in (PolicyVersion(1, 1), "1.2", 3):
            session.record_version(version)
    assert api.versions == [PolicyVersion(1, 1), PolicyVersion(1, 2), PolicyVersion(1, 3)]


def test_client_records_a_version_or_its_label() -> None:
    sent: list[object] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, text=RECORD.model_dump_json())

    with SyncClient("http://api") as api:
        api._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(answer))
        api.record_version("sums", PolicyVersion(1, 20))
        api.record_version("sums", "1.20")
    assert sent == [{"incarnation": 1, "step": 20}] * 2


def test_session_waits_until_its_run_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.leases._RUN_EVERY", 0.0)
    api = Api()
    api.refusals = [ErrorCode.RUN_MISSING] * 3
    with LeaseSession(api.client, "sums", {}, wait=60) as session:
        assert session.incarnation == RECORD.incarnation
    assert api.refusals == []


def test_session_waits_for_a_missing_run_only_and_not_longer_than_asked() -> None:
    api = Api()
    api.refusals = [ErrorCode.SUSPENDED]
    with raises(ApiError, "suspended"), LeaseSession(api.client, "sums", {}, wait=60):
        pass
    for wait in (0.0, 0.01):
        api.refusals = [ErrorCode.RUN_MISSING] * 10
        with raises(ApiError, "run_missing"), LeaseSession(api.client, "sums", {}, wait=wait):
            pass
    assert api.refusals
