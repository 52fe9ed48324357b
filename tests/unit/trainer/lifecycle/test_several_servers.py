"""Every server gets every publication; an unreachable server never delays the others longer than necessary."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.unit.trainer.lifecycle.model_server import ModelServerStandIn

from gristmill import PolicyVersion
from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish import ModelServer, ModelServers

FOLDER = Path("/weights/run")


@pytest.fixture
def pair() -> Iterator[list[ModelServerStandIn]]:
    servers = [ModelServerStandIn(), ModelServerStandIn()]
    yield servers
    for server in servers:
        server.stop()


def _target(pair: list[ModelServerStandIn], wait_for_all: bool, patience: float = 30.0) -> ModelServers:
    return ModelServers([ModelServer(server.url, "token", patience) for server in pair], wait_for_all=wait_for_all)


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


@pytest.mark.parametrize("wait_for_all", [True, False])
def test_publisher_load_returns_when_all_servers_have_the_weights(
    pair: list[ModelServerStandIn], wait_for_all: bool
) -> None:
    target = _target(pair, wait_for_all)
    pair[1].load_seconds = 0.3
    for step in range(3):
        target.load(FOLDER / f"1.{step}", PolicyVersion(1, step))
        assert [server.version for server in pair] == [f"1.{step}"] * 2
        assert not any(server.paused for server in pair)
    target.close()


def test_synchronous_publisher_waits_for_an_unreachable_server(pair: list[ModelServerStandIn]) -> None:
    target = _target(pair, wait_for_all=True)
    pair[1].stop()
    loading = threading.Thread(target=target.load, args=(FOLDER / "1.0", PolicyVersion(1, 0)))
    loading.start()
    _until(lambda: pair[0].version == "1.0" and not pair[0].paused)
    assert loading.is_alive()
    pair[1].start()
    loading.join()
    assert pair[1].version == "1.0"
    target.close()


def test_publisher_does_not_wait_and_a_late_server_gets_the_newest_weights(pair: list[ModelServerStandIn]) -> None:
    target = _target(pair, wait_for_all=False)
    pair[1].stop()
    for step in range(2):
        target.load(FOLDER / f"1.{step}", PolicyVersion(1, step))
        assert pair[0].version == f"1.{step}"
    pair[1].start()
    _until(lambda: pair[1].version == "1.1")
    assert pair[1].loads == [str(FOLDER / "1.1")]
    target.close()


def test_publisher_publishes_again_to_a_restarted_server_without_waiting(pair: list[ModelServerStandIn]) -> None:
    target = _target(pair, wait_for_all=True)
    target.load(FOLDER / "1.4", PolicyVersion(1, 4))
    pair[0].stop()
    target.ensure()
    pair[0].start()
    _until(lambda: pair[0].version == "1.4")
    assert len(pair[1].loads) == 1
    target.close()


def test_synchronous_publisher_fails_with_the_unreachable_servers_name(pair: list[ModelServerStandIn]) -> None:
    target = _target(pair, wait_for_all=True, patience=1.0)
    pair[1].stop()
    with raises(PublishError, "model_server_unreachable", url=pair[1].url) as raised:
        target.load(FOLDER / "1.0", PolicyVersion(1, 0))
    assert raised.value.values["tried_for"] > 1.0
    target.close()
    pair[1].start()
