"""Every server gets every publication; an unreachable server never delays the others longer than necessary."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.errors import raises
from tests.unit.trainer.lifecycle.model_server import ModelServerStandIn

from gristmill import PolicyVersion
from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.servers import ModelServer, ServerList

FOLDER = Path("/weights/run")


@pytest.fixture
def pair() -> Iterator[list[ModelServerStandIn]]:
    servers = [ModelServerStandIn(), ModelServerStandIn()]
    yield servers
    for server in servers:
        server.stop()


def _target(pair: list[ModelServerStandIn], background: bool = False, patience: float = 30.0) -> ModelServers:
    return ModelServers([ModelServer(server.url, "token", patience) for server in pair], background=background)


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


@pytest.mark.parametrize("background", [True, False])
def test_publisher_load_returns_when_all_servers_have_the_weights(
    pair: list[ModelServerStandIn], background: bool
) -> None:
    target = _target(pair, background)
    for step in range(3):
        pair[1].hold_loads()
        threading.Timer(0.3, pair[1].release_loads).start()
        target.load(FOLDER / f"1.{step}", PolicyVersion(1, step))
        assert [server.version for server in pair] == [f"1.{step}"] * 2
        assert not any(server.paused for server in pair)
    target.close()


@pytest.mark.parametrize("background", [True, False])
def test_publisher_does_not_wait_and_a_late_server_gets_the_newest_weights(
    pair: list[ModelServerStandIn], background: bool
) -> None:
    target = _target(pair, background)
    pair[1].stop()
    for step in range(2):
        target.load(FOLDER / f"1.{step}", PolicyVersion(1, step))
        assert pair[0].version == f"1.{step}"
    pair[1].start()
    _until(lambda: pair[1].version == "1.1")
    assert pair[1].loads == [str(FOLDER / "1.1")]
    target.close()


def test_publisher_publishes_again_to_a_restarted_server_without_waiting(pair: list[ModelServerStandIn]) -> None:
    target = _target(pair)
    target.load(FOLDER / "1.4", PolicyVersion(1, 4))
    pair[0].stop()
    target.ensure()
    pair[0].start()
    _until(lambda: pair[0].version == "1.4")
    assert len(pair[1].loads) == 1
    target.close()


def test_publisher_without_a_server_that_answers_fails_with_a_servers_name(pair: list[ModelServerStandIn]) -> None:
    target = _target(pair, patience=1.0)
    for server in pair:
        server.stop()
    with raises(PublishError, "model_server_unreachable", url=pair[0].url) as raised:
        target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    assert raised.value.values["tried_for"] > 1.0
    target.close()
    for server in pair:
        server.start()


def test_server_that_hangs_before_a_load_is_left_out(
    pair: list[ModelServerStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = _target(pair)
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    monkeypatch.setattr("gristmill_trainer.publish.servers._ALIVE_TIMEOUT", 0.5)
    pair[1].hang()
    target.load(FOLDER / "1.1", PolicyVersion(1, 1))
    assert [server.loads[-1] for server in pair] == [str(FOLDER / "1.1"), str(FOLDER / "1.0")]
    pair[1].resume()
    _until(lambda: pair[1].version == "1.1")
    target.close()


def test_server_that_hangs_in_a_load_delays_one_publication_and_no_other(
    pair: list[ModelServerStandIn], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    target = _target(pair)
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    monkeypatch.setattr("gristmill_trainer.publish.pool._OTHERS_LEAST", 0.5)
    pair[1].hold_loads()
    for step in (1, 2, 3):
        target.load(FOLDER / f"1.{step}", PolicyVersion(1, step))
        assert [server.version for server in pair] == [f"1.{step}", "1.0"]
        monkeypatch.setattr("gristmill_trainer.publish.pool._OTHERS_LEAST", 60.0)
        _until(lambda: len(pair[1].begun) == 2)
    pair[1].release_loads()
    _until(lambda: pair[1].version == "1.3")
    assert pair[1].loads == [str(FOLDER / version) for version in ("1.0", "1.1", "1.3")]
    target.load(FOLDER / "1.3", PolicyVersion(1, 3))
    states = [text.split("state=")[1].split()[0] for text in caplog.messages if text.startswith("model server")]
    assert states == ["away", "up"]
    target.close()


def test_server_that_refuses_later_is_left_out_while_another_serves(pair: list[ModelServerStandIn]) -> None:
    """It was replaced by a server that allows no updates, or has another token."""
    target = _target(pair, patience=2.0)
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    pair[1].refusal = 404, "not_found"
    target.load(FOLDER / "1.1", PolicyVersion(1, 1))
    target.ensure()
    assert [server.version for server in pair] == ["1.1", "1.0"]
    pair[1].refusal = None
    _until(lambda: pair[1].version == "1.1")
    pair[1].refusal = 401, "unauthorized"
    target.load(FOLDER / "1.2", PolicyVersion(1, 2))
    pair[0].stop()
    pair[0].start()
    target.ensure()
    _until(lambda: pair[0].version == "1.2")
    target.load(FOLDER / "1.3", PolicyVersion(1, 3))
    assert pair[0].version == "1.3", "a restart of the only server that serves does not end the training"
    pair[1].refusal = None
    _until(lambda: pair[1].version == "1.3")
    for server in pair:
        server.refusal = 404, "not_found"
    with raises(PublishError, "model_server_refused", url=pair[0].url, status=404):
        target.load(FOLDER / "1.4", PolicyVersion(1, 4))
    target.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_training_continues_when_one_server_is_away_for_longer_than_its_patience(
    pair: list[ModelServerStandIn], monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    later = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later)
    monkeypatch.setattr("gristmill_trainer.publish.pool.time", clock)
    target = _target(pair, patience=50.0)
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    monkeypatch.setattr("gristmill_trainer.publish.pool._OTHERS_LEAST", 0.2)
    if hangs:
        pair[1].hold_loads()
    else:
        pair[1].stop()
    target.load(FOLDER / "1.1", PolicyVersion(1, 1))
    later = 100.0
    for step in (2, 3):
        target.load(FOLDER / f"1.{step}", PolicyVersion(1, step))
        assert pair[0].version == f"1.{step}"
    if not hangs:
        target.ensure()
        pair[0].stop()  # Its own patience begins now.
        time.sleep(0.5)
        target.ensure()
        pair[0].start()
        pair[1].start()
        _until(lambda: pair[0].version == "1.3")
    pair[1].release_loads()
    _until(lambda: pair[1].version == "1.3")
    target.close()


def test_server_that_loses_the_first_version_and_refuses_is_left_out(pair: list[ModelServerStandIn]) -> None:
    target = _target(pair)
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    pair[1].version, pair[1].refusal = "default", (404, "not_found")
    for _ in range(20):
        target.ensure()
        time.sleep(0.05)
    pair[1].refusal = None
    _until(lambda: pair[1].version == "1.0")
    target.close()


def test_all_servers_sleep_until_the_next_version_or_until_they_are_woken(pair: list[ModelServerStandIn]) -> None:
    target = _target(pair)
    for step, level in enumerate((1, 2)):
        target.load(FOLDER / f"1.{step}", PolicyVersion(1, step))
        target.wake()  # Awake servers load nothing.
        target.sleep(level)
        assert [(server.version, server.asleep) for server in pair] == [(f"1.{step}", level)] * 2
        target.ensure()
    assert not target.wake()
    assert [(server.loads[-2:], server.asleep) for server in pair] == [([str(FOLDER / "1.1")] * 2, 0)] * 2
    target.close()


def test_no_step_waits_for_the_sleep_of_a_server_that_is_away(pair: list[ModelServerStandIn]) -> None:
    target = _target(pair)
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    pair[1].stop()
    target.sleep(2)
    assert pair[0].asleep == 2
    pair[1].start()
    _until(lambda: (pair[1].version, pair[1].asleep) == ("1.0", 2))
    target.load(FOLDER / "1.1", PolicyVersion(1, 1))
    assert [(server.version, server.asleep) for server in pair] == [("1.1", 0)] * 2
    target.close()


def test_end_of_a_training_names_the_servers_that_it_could_not_wake(
    pair: list[ModelServerStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = _target(pair)
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    target.sleep(2)
    pair[1].refusal = 500, "publish_failed"
    monkeypatch.setattr("gristmill_trainer.publish.pool._WAKING", 2.0)
    assert target.wake() == [pair[1].url]
    assert [server.asleep for server in pair] == [0, 2]
    target.close()


@pytest.mark.parametrize("status", [401, 409])
def test_trainer_that_was_replaced_computes_no_step_beside_awake_servers(
    pair: list[ModelServerStandIn], status: int
) -> None:
    target = _target(pair)
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    for server in pair:
        server.refusal = status, "refused"
    if status == 409:
        with raises(PublishError, "model_server_refused", status=409):
            target.sleep(2)
    else:
        target.sleep(2)
        with raises(PublishError, "model_server_refused", status=401):
            target.load(FOLDER / "1.1", PolicyVersion(1, 1))
    target.close()


def test_end_of_a_training_wakes_the_servers_beside_the_one_that_ended_it(pair: list[ModelServerStandIn]) -> None:
    target = _target(pair)
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    pair[1].refusal = 409, "fenced"
    with raises(PublishError, "model_server_refused", status=409):
        target.sleep(2)
    assert target.wake() == [pair[1].url]
    assert pair[0].asleep == 0
    target.close()


def test_server_that_refuses_to_sleep_gets_the_next_version(
    pair: list[ModelServerStandIn], caplog: pytest.LogCaptureFixture
) -> None:
    target = _target(pair)
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    pair[1].refusal = 500, "publish_failed"
    target.sleep(2)
    pair[1].refusal = None
    assert [server.asleep for server in pair] == [2, 0]
    assert [pair[1].url in text for text in caplog.messages] == [True]
    target.load(FOLDER / "1.1", PolicyVersion(1, 1))
    assert [(server.version, server.asleep, len(server.loads)) for server in pair] == [("1.1", 0, 2)] * 2
    target.close()


class _FailsReceipt:
    """Proofs of all servers but one hold."""

    def __init__(self, failing: str) -> None:
        self.failing = failing

    def expects(self, version: PolicyVersion) -> bool:
        return True

    def check(self, server: ModelServer, version: PolicyVersion, attempt: int) -> PublishError | None:
        if server.url != self.failing:
            return None
        server.leave_out()
        return PublishError("receipt_failed", "another function", url=server.url)


@pytest.mark.parametrize("refuses", [False, True])
def test_training_ends_when_one_server_is_left_out_and_the_other_is_lost(
    pair: list[ModelServerStandIn], refuses: bool
) -> None:
    servers = [ModelServer(server.url, "token", 1.0) for server in pair]
    target = ModelServers(servers, proof=_FailsReceipt(pair[0].url))
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    target.prove()
    if refuses:
        pair[1].version, pair[1].refusal = "default", (401, "unauthorized")
    else:
        pair[1].stop()
    code = "model_server_refused" if refuses else "model_server_unreachable"
    with raises(PublishError, code, url=pair[1].url):
        while True:
            target.ensure()
            time.sleep(0.05)
    if not refuses:
        pair[1].start()
    target.close()


def test_server_that_starts_after_the_first_publication_and_refuses_is_left_out(pair: list[ModelServerStandIn]) -> None:
    target = _target(pair)
    pair[1].stop()
    for step in (0, 1):
        target.load(FOLDER / f"1.{step}", PolicyVersion(1, step))
    pair[1].refusal = 401, "unauthorized"
    pair[1].start()
    time.sleep(1.5)  # Several attempts.
    target.ensure()
    target.load(FOLDER / "1.2", PolicyVersion(1, 2))
    assert [server.version for server in pair] == ["1.2", "default"]
    target.close()


@pytest.mark.parametrize(("status", "first"), [(404, True), (401, True), (409, True), (409, False)])
def test_refusal_of_the_first_weights_or_of_this_trainer_ends_the_training(
    pair: list[ModelServerStandIn], status: int, first: bool
) -> None:
    target = _target(pair)
    if not first:
        target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    pair[1].refusal = status, "refused"
    with raises(PublishError, "model_server_refused", url=pair[1].url, status=status):
        target.load(FOLDER / "1.1", PolicyVersion(1, 1))
    target.close()


def test_server_that_joins_late_and_refuses_does_not_end_the_training(pair: list[ModelServerStandIn]) -> None:
    clients = [ModelServer(server.url, "token", 30.0) for server in pair]
    found = clients[:1]
    pair[1].refusal = 401, "unauthorized"
    target = ModelServers(clients[:1], look_up=lambda: tuple(found))
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    found.append(clients[1])
    _until(lambda: len(target.servers) == 2)
    target.load(FOLDER / "1.1", PolicyVersion(1, 1))
    assert [server.version for server in pair] == ["1.1", "default"]
    pair[1].refusal = None
    _until(lambda: pair[1].version == "1.1")
    target.close()


def test_server_that_joins_gets_the_weights_and_a_server_that_left_gets_none(pair: list[ModelServerStandIn]) -> None:
    clients = [ModelServer(server.url, "token", 30.0) for server in pair]
    found = clients[:1]
    target = ModelServers(clients[:1], look_up=lambda: tuple(found))
    target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    found.append(clients[1])
    _until(lambda: pair[1].version == "1.0" and not pair[1].paused)
    del found[0]
    target.load(FOLDER / "1.1", PolicyVersion(1, 1))
    assert [server.version for server in pair] == ["1.1", "1.1"], "a server that answers stays, whatever its name says"
    pair[0].stop()
    target.load(FOLDER / "1.2", PolicyVersion(1, 2))
    _until(lambda: list(target.servers) == clients[1:])
    pair[0].start()
    target.load(FOLDER / "1.3", PolicyVersion(1, 3))
    assert [server.version for server in pair] == ["default", "1.3"]
    target.close()


def test_server_list_waits_for_the_first_server_that_answers(pair: list[ModelServerStandIn]) -> None:
    pair[0].stop()
    servers = ServerList([server.url for server in pair], patience=30.0)
    assert servers.served() == {"id": "tiny"}
    pair[1].stop()
    threading.Timer(0.5, pair[0].start).start()
    assert servers.served() == {"id": "tiny"}
    pair[1].start()


def test_server_list_of_a_name_without_an_address_names_it() -> None:
    url = "dns+http://model.invalid:9001"
    with raises(PublishError, "no_model_server", url=url):
        ServerList([url], patience=0.0).served()
