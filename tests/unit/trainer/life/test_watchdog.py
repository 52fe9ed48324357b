"""The line says who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.trainer.life.model_server import ModelServerStandIn

from gristmill import RunState, RunStatus
from gristmill_trainer.publish import ModelServer
from gristmill_trainer.watchdog import ServerState, Wanted, diagnose, look_at

GOOD = ServerState("http://m:9001", None, False, "1.4")


def _status(**facts: Any) -> RunStatus:
    known: dict[str, Any] = {
        "state": RunState.OPEN, "ready": 3, "leased": 0, "trained": 64, "dead": 0, "sequences": {},
        "bytes_by_state": {},
        "accepted": 67, "outstanding": 13, "rows_issued": 80, "bytes": 0, "last_submit_s": 70.0, "last_asked_s": 3.0,
    }  # fmt: skip
    return RunStatus(**{**known, **facts})


@pytest.mark.parametrize(
    ("facts", "server", "said"),
    [
        ({"outstanding": 0, "last_asked_s": None, "last_submit_s": None}, GOOD,
         "no environment asks for permits (none ever did; no group ever came): start one"),
        ({"outstanding": 0, "last_asked_s": 300.0, "last_submit_s": 320.0}, GOOD,
         "no environment asks for permits (the last request was 300 s ago; the last group came 320 s ago): start one"),
        ({}, ServerState("http://m:9001", "the model server at http://m:9001 did not answer GET /health"),
         "holds 13 permits and the last group came 70 s ago: the model server at http://m:9001 did not answer"),
        ({}, ServerState("http://m:9001", None, True, "1.4"), "http://m:9001 is paused; POST http://m:9001/resume"),
        ({}, ServerState("http://m:9001", None, False, "default"), "serves version default, not 1.4"),
        ({"dropped": {"same_scores": 40, "too_long": 2}}, GOOD, "is dropped (same_scores 40)"),
        ({"outstanding": 0}, GOOD, "asks for permits and gets none"),
        ({"accepted": 70}, GOOD, "3 groups came meanwhile: generation is slow"),
        ({}, GOOD, "holds 13 permits and the last group came 70 s ago, and the model server answers"),
    ],
)  # fmt: skip
def test_who_waits_for_whom(facts: dict[str, Any], server: ServerState, said: str) -> None:
    line = diagnose(61.0, Wanted(16), _status(dropped={"too_long": 2}), _status(**facts), [GOOD, server], "1.4")
    assert line.startswith("no batch for 61 s: 3 of 16 groups ready; ")
    assert said in line


ATROPOS = Wanted(128, "sequences")
UPDATED = ServerState("http://m:9001", None, True, "1.3")


@pytest.mark.parametrize(
    ("wanted", "server", "publishing", "said"),
    [
        (ATROPOS, GOOD, False,
         "no batch for 61 s: 24 of 128 sequences ready; the last group came 70 s ago, and the model server answers"),
        (ATROPOS, ServerState("http://m:9001", "it did not answer"), False, "70 s ago: it did not answer"),
        (ATROPOS, UPDATED, False, "70 s ago: the model server at http://m:9001 is paused"),
        (Wanted(16, published=False), ServerState("http://m:9001", None, False, "default"), False,
         "and the model server answers: completions are long"),
        (Wanted(16), UPDATED, True, "70 s ago: version 1.4 is being published to the model server at http://m:9001"),
        (Wanted(16), ServerState("http://m:9001", None, False, "1.3"), True, ": version 1.4 is being published"),
        (Wanted(16), ServerState("http://m:9001", "it did not answer"), True, "70 s ago: it did not answer"),
    ],
)  # fmt: skip
def test_what_is_as_it_should_be_is_not_blamed(
    wanted: Wanted, server: ServerState, publishing: bool, said: str
) -> None:
    facts = {"outstanding": 0, "last_asked_s": None} if wanted is ATROPOS else {}
    status = _status(**facts, sequences={"ready": 24})
    line = diagnose(61.0, wanted, status, status, [server], "1.4", publishing)
    assert said in line
    assert "permits" not in line or wanted is not ATROPOS


def test_a_server_is_asked_and_never_waited_for() -> None:
    stand_in = ModelServerStandIn()
    stand_in.version, stand_in.paused = "1.4", True
    server = ModelServer(stand_in.url, "token")
    assert look_at(server) == ServerState(stand_in.url, None, True, "1.4")
    stand_in.stop()
    assert f"{stand_in.url} did not answer" in (look_at(server).problem or "")


def test_what_answers_in_a_servers_place_is_no_reason_to_end() -> None:
    """A proxy's page, while the server behind it is down."""
    stand_in = ModelServerStandIn()
    stand_in.broken = True
    state = look_at(ModelServer(stand_in.url, "token"))
    assert f"{stand_in.url} answers GET /is_paused, but not as a model server does" in (state.problem or "")
    stand_in.stop()
