"""The error that ends a background thread is raised where the thread's owner next checks, whatever its type."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.unit.trainer.lifecycle.api_stand_in import ApiStandIn
from tests.unit.trainer.lifecycle.conftest import prepare, step_groups
from tests.unit.trainer.lifecycle.model_server import ModelServerStandIn

from gristmill import GristmillError, LeaseSession, PolicyVersion
from gristmill_trainer.batch_source import Prefetch
from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.servers import ModelServer


def test_session_raises_the_error_of_the_heartbeat_thread() -> None:
    api = ApiStandIn(step_groups(1))
    with LeaseSession(api.client, "run", {}, heartbeat=0.01) as session:
        session.lease(1, 0.0)
        api.error = ValueError("no JSON")
        session._thread.join(30)
        api.error = None
        with raises(GristmillError, "unexpected_error", what="extending the leases", error="ValueError") as raised:
            session.lease(2, 0.0)
    assert "no JSON" in str(raised.value)


def test_prefetch_raises_the_error_of_its_thread() -> None:
    api = ApiStandIn()
    with LeaseSession(api.client, "run", {}) as session:
        api.error = ValueError("no msgpack")
        prefetch = Prefetch(session, prepare, 1, 10)
        prefetch._thread.join(30)
        api.error = None
        with raises(
            GristmillError, "unexpected_error", what="leasing the next step's groups", error="ValueError"
        ) as raised:
            prefetch.get(1, 0.1)
        assert "no msgpack" in str(raised.value)
        prefetch.close()


class _Defect(ModelServer):
    """Fails with an unexpected error, on request."""

    fails = True

    def served_version(self) -> str:
        if self.fails:
            raise ZeroDivisionError
        return super().served_version()

    def publish(self, path: Path, version: PolicyVersion) -> None:
        if self.fails:
            raise ZeroDivisionError
        super().publish(path, version)


def test_publisher_raises_the_error_of_one_servers_thread() -> None:
    servers = [ModelServerStandIn(), ModelServerStandIn()]
    target = ModelServers([ModelServer(servers[0].url, "token"), _Defect(servers[1].url, "token")])
    with raises(PublishError, "unexpected_error", url=servers[1].url, error="ZeroDivisionError"):
        target.load(Path("/weights/1.0"), PolicyVersion(1, 0))
    target.close()
    for server in servers:
        server.stop()


@pytest.mark.timeout(60)
def test_publisher_raises_the_error_of_the_server_check_thread() -> None:
    server = ModelServerStandIn()
    asked = _Defect(server.url, "token")
    asked.fails = False
    target = ModelServers([asked])
    target.load(Path("/weights/1.0"), PolicyVersion(1, 0))
    asked.fails = True

    def look_on() -> None:
        while True:
            target.ensure()
            time.sleep(0.01)

    with raises(PublishError, "unexpected_error", url=server.url, error="ZeroDivisionError"):
        look_on()
    target.close()
    server.stop()
