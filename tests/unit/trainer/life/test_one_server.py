"""One server that is away is looked at again and again, as long as its patience and nobody's request to stop last."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.trainer.life.model_server import ModelServerStandIn

from gristmill import PolicyVersion
from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish import ModelServer, OneServer, SeveralServers
from gristmill_trainer.stop import StopRequest

FOLDER, VERSION = Path("/weights/1.4"), PolicyVersion(1, 4)


@pytest.fixture
def server() -> Iterator[ModelServerStandIn]:
    server = ModelServerStandIn()
    yield server
    server.stop()


def test_one_that_is_away_is_not_waited_for_and_has_its_weights_when_it_is_back(server: ModelServerStandIn) -> None:
    target = OneServer(ModelServer(server.url, "token"))
    target.load(FOLDER, VERSION)
    server.stop()
    target.ensure(FOLDER, VERSION)
    server.start()
    target.ensure(FOLDER, VERSION)
    assert server.version == "1.4"
    assert not server.paused


def test_one_that_stays_away_ends_the_training(server: ModelServerStandIn) -> None:
    target = OneServer(ModelServer(server.url, "token", 0.0))
    server.stop()
    with pytest.raises(PublishError, match=r"did not answer GET /weight_info .*\(tried for"):
        target.ensure(FOLDER, VERSION)
    server.start()


@pytest.mark.parametrize("several", [False, True])
def test_a_request_to_stop_ends_the_tries(server: ModelServerStandIn, several: bool) -> None:
    stop = StopRequest(50.0)
    stop.grace = 0.0
    away = ModelServer(server.url, "token", stop.patience)
    target = SeveralServers([away], wait_for_all=True) if several else OneServer(away)
    server.stop()
    threading.Timer(0.5, signal.raise_signal, [signal.SIGTERM]).start()
    with pytest.raises(PublishError, match=r"did not answer .*\(tried for"):
        target.load(FOLDER, VERSION)
    assert stop.requested
    target.close()
    server.start()
