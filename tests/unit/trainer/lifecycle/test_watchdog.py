"""The log line reports which process waits for which."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.trainer.lifecycle.model_server import ModelServerStandIn

from gristmill import RunState, RunStatus
from gristmill.internal.trouble import ServerFacts
from gristmill_trainer.watchdog import Wanted, ask, diagnose

GOOD = ServerFacts("http://m:9001", "1.4")
AWAY = ServerFacts("http://m:9001", problem="connection refused")


def _status(**facts: Any) -> RunStatus:
    known: dict[str, Any] = {
        "state": RunState.OPEN, "ready": 3, "leased": 0, "trained": 64, "dead": 0, "sequences": {},
        "bytes_by_state": {},
        "accepted": 67, "outstanding": 13, "rows_issued": 80, "bytes": 0, "last_submit_s": 70.0, "last_asked_s": 3.0,
    }  # fmt: skip
    return RunStatus(**{**known, **facts})


@pytest.mark.parametrize(
    ("facts", "server", "code", "told"),
    [
        ({"outstanding": 0, "last_asked_s": None, "last_submit_s": None}, GOOD, "no_environment", []),
        ({"outstanding": 0, "last_asked_s": 300.0, "last_submit_s": 320.0}, GOOD, "no_environment",
         ["300 s", "320 s"]),
        ({}, AWAY, "model_server_unreachable", ["13 permits", "70 s", "connection refused"]),
        ({}, ServerFacts("http://m:9001", "1.4", paused=True), "model_server_paused", ["restart the model server at http://m:9001"]),
        ({}, ServerFacts("http://m:9001", "default"), "server_behind", ["http://m:9001", "default", "1.4"]),
        ({}, ServerFacts("http://m:9001", "unproven"), "receipt_failed", ["http://m:9001"]),
        ({"dropped": {"same_scores": 40, "too_long": 2}}, GOOD, "groups_dropped", ["40 of 40", ": same_scores 40"]),
        ({"outstanding": 0}, GOOD, "no_permits", ["70 s"]),
        ({"accepted": 70, "last_submit_s": 20.0}, GOOD, "generation_slow", ["3 groups"]),
        ({}, GOOD, "no_groups_come", ["13 permits", "70 s"]),
    ],
)  # fmt: skip
def test_watchdog_reports_which_process_waits_for_which(
    facts: dict[str, Any], server: ServerFacts, code: str, told: list[str]
) -> None:
    found = diagnose(61.0, Wanted(16), _status(dropped={"too_long": 2}), _status(**facts), [GOOD, server], "1.4")
    assert found.code == code
    for word in ("61 s", "3 of 16 groups", *told):
        assert word in f"{found.text}. {found.remedy}"


ATROPOS = Wanted(128, "sequences")
UPDATED = ServerFacts("http://m:9001", "1.3", paused=True)


@pytest.mark.parametrize(
    ("wanted", "server", "publishing", "code", "told"),
    [
        (ATROPOS, GOOD, False, "no_groups_come", ["24 of 128 sequences", "70 s"]),
        (ATROPOS, AWAY, False, "model_server_unreachable", ["70 s"]),
        (ATROPOS, UPDATED, False, "model_server_paused", ["70 s", "http://m:9001"]),
        (Wanted(16, published=False), ServerFacts("http://m:9001", "default"), False, "no_groups_come", []),
        (Wanted(16), UPDATED, True, "publishing", ["70 s", "version 1.4", "http://m:9001"]),
        (Wanted(16), ServerFacts("http://m:9001", "1.3"), True, "publishing", ["version 1.4"]),
        (Wanted(16), AWAY, True, "model_server_unreachable", ["70 s"]),
    ],
)  # fmt: skip
def test_watchdog_does_not_blame_an_expected_state(
    wanted: Wanted, server: ServerFacts, publishing: bool, code: str, told: list[str]
) -> None:
    facts = {"outstanding": 0, "last_asked_s": None} if wanted is ATROPOS else {}
    status = _status(**facts, sequences={"ready": 24})
    found = diagnose(61.0, wanted, status, status, [server], "1.4", publishing)
    assert found.code == code
    for word in ("61 s", *told):
        assert word in found.text
    assert "permits" not in found.text or wanted is not ATROPOS


def test_watchdog_reports_the_state_of_a_server_without_waiting() -> None:
    stand_in = ModelServerStandIn()
    stand_in.version, stand_in.paused = "1.4", True
    assert ask(stand_in.url) == ServerFacts(stand_in.url, "1.4", paused=True)
    stand_in.stop()
    found = ask(stand_in.url)
    assert found.problem
    assert not found.busy


def test_watchdog_reports_another_service_on_the_server_port() -> None:
    """A proxy's page, while the server behind it is down."""
    stand_in = ModelServerStandIn()
    stand_in.broken = True
    found = ask(stand_in.url)
    assert found.problem
    assert "not a model server" in found.problem
    stand_in.stop()
