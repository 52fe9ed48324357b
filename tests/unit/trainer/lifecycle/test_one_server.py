"""The trainer waits for an unreachable or unfinished server, until its patience ends or a stop is requested."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.support.http_server import Answer, HttpServer
from tests.unit.trainer.lifecycle.model_server import ModelServerStandIn

from gristmill import PolicyVersion
from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.servers import ModelServer
from gristmill_trainer.stop import StopRequest

FOLDER, VERSION = Path("/weights/1.4"), PolicyVersion(1, 4)


@pytest.fixture
def server() -> Iterator[ModelServerStandIn]:
    server = ModelServerStandIn()
    yield server
    server.stop()


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def test_publisher_continues_without_an_unreachable_server_and_loads_it_later(server: ModelServerStandIn) -> None:
    target = ModelServers([ModelServer(server.url, "token")])
    target.load(FOLDER, VERSION)
    server.stop()
    target.ensure()
    server.start()
    _until(lambda: server.version == "1.4" and not server.paused)
    target.close()


def test_publisher_retries_when_another_service_answers_on_the_model_server_port(server: ModelServerStandIn) -> None:
    """A proxy's page, until the server is back with its first weights."""
    target = ModelServers([ModelServer(server.url, "token")])
    target.load(FOLDER, VERSION)
    server.broken = True
    for _ in range(300):
        target.ensure()
        time.sleep(0.01)
    server.broken, server.version = False, "default"
    _until(lambda: server.version == "1.4" and not server.paused)
    target.close()


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        ({"data": ["x"]}, {}, "not_a_model_server"),
        ({"data": [{}]}, {}, "not_a_model_server"),
        ({"data": [{"id": "m", "max_model_len": "many"}]}, {}, "not_a_model_server"),
        (b'{"data": [{"id": "m", "max_model_len": 1e400}]}', {}, "not_a_model_server"),
        (b"[" * 100_000, {}, "not_a_model_server"),
        (b"\xff", {}, "not_a_model_server"),
        (b"not gzip", {"Content-Encoding": "gzip"}, "model_server_unreachable"),
    ],
)
def test_answer_of_another_program_is_an_error_with_its_address(
    body: object, headers: dict[str, str], code: str
) -> None:
    with HttpServer(lambda request: Answer(200, body, headers)) as other:
        with raises(PublishError, code, url=other.url, request="GET /v1/models") as raised:
            ModelServer(other.url).first_model()
        assert "within" not in str(raised.value)


def test_publisher_fails_if_the_server_stays_unreachable(server: ModelServerStandIn) -> None:
    target = ModelServers([ModelServer(server.url, "token", 0.5)])
    target.load(FOLDER, VERSION)
    server.stop()

    def looked() -> None:
        while True:
            target.ensure()
            time.sleep(0.01)

    with raises(PublishError, "model_server_unreachable", url=server.url) as raised:
        looked()
    assert raised.value.values["tried_for"] > 0.5
    target.close()
    server.start()


def test_stop_request_ends_the_retries_of_a_publication(server: ModelServerStandIn) -> None:
    stop = StopRequest(50.0)
    stop.grace = 0.0
    target = ModelServers([ModelServer(server.url, "token", stop.patience)])
    server.stop()
    threading.Timer(0.5, signal.raise_signal, [signal.SIGTERM]).start()
    with raises(PublishError, "model_server_unreachable", url=server.url) as raised:
        target.load(FOLDER, VERSION)
    assert raised.value.values["tried_for"] > 0
    assert stop.requested
    target.close()
    server.start()


@pytest.mark.parametrize("synchronous", [True, False])
def test_stop_request_ends_the_wait_for_a_hanging_server(server: ModelServerStandIn, synchronous: bool) -> None:
    """In the background, a publication may use the rest of the grace period, because nothing waits for it."""
    stop = StopRequest(50.0)
    stop.grace = 60.0 if synchronous else 1.0
    model_server = ModelServer(server.url, "token", lambda: 0.5 if stop.requested else 600.0)
    target = ModelServers([model_server], background=not synchronous, closing=lambda: stop.seconds_left)
    server.hold_loads()

    def stop_during_the_load() -> None:
        _until(lambda: server.paused)
        signal.raise_signal(signal.SIGTERM)

    threading.Thread(target=stop_during_the_load).start()
    with raises(PublishError, "model_server_loading", url=server.url) as raised:
        target.load(FOLDER, VERSION)
    assert raised.value.values["tried_for"] > 0
    assert stop.requested
    assert (stop.seconds_left > 0) == synchronous
    assert server.paused, "and it does not keep the process from its end"
    server.release_loads()


def test_load_in_progress_may_end_before_the_process(server: ModelServerStandIn) -> None:
    target = ModelServers([ModelServer(server.url, "token", 0.2)], closing=lambda: 30.0)
    server.hold_loads()
    with raises(PublishError, "model_server_loading", url=server.url):
        target.load(FOLDER, VERSION)
    assert server.paused
    threading.Timer(0.5, server.release_loads).start()
    target.close()
    assert server.version == "1.4"
    assert not server.paused
