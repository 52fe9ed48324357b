"""The real server, started in each supported way: an API without tokens that other machines can reach logs a clear
warning.

Redis is not reachable in any of these tests, so no data is exposed.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from tests.support.api_server import ApiServer
from tests.support.grids import rest_is_long

from gristmill_api.background import listening

NOBODY_THERE = "redis://127.0.0.1:1/0"
LOUD = "THE API IS OPEN TO THE NETWORK"


def _log(server: ApiServer) -> str:
    """Returns the log once the process has reported its address. The warning, if any, follows right after that."""
    deadline = time.monotonic() + 10
    while "listens=" not in server.log():
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)
    server.stop()
    return server.log()


def test_api_without_tokens_warns_if_other_machines_can_reach_it() -> None:
    with ApiServer(NOBODY_THERE, host="0.0.0.0") as server:
        log = _log(server)
        assert f"listens at 0.0.0.0:{server.port} and API_AUTH is none" in log
        assert log.count(LOUD) == 1


@pytest.mark.long
def test_api_with_several_workers_warns_if_other_machines_can_reach_it() -> None:
    with ApiServer(NOBODY_THERE, host="0.0.0.0", WEB_CONCURRENCY="2") as server:
        assert f"listens at 0.0.0.0:{server.port}" in _log(server)


@pytest.mark.parametrize("case", rest_is_long("token", "loopback", "compose"))
def test_api_on_loopback_in_compose_or_with_tokens_does_not_warn(case: str, tmp_path: Path) -> None:
    environ = {"loopback": {}, "compose": {"API_IN_COMPOSE": "1"}, "token": {}}[case]
    if case == "token":
        environ = {"API_AUTH": "token", "API_TOKENS_DIR": str(tmp_path)}
        for role in ("env", "trainer", "admin"):
            (tmp_path / role).write_text(role * 20)
            (tmp_path / role).chmod(0o600)
    host = "127.0.0.1" if case == "loopback" else "0.0.0.0"
    with ApiServer(NOBODY_THERE, host=host, **environ) as server:
        log = _log(server)
        assert f"listens={host}:{server.port} auth={'token' if case == 'token' else 'none'}" in log
        assert LOUD not in log


def test_own_listening_sockets_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        address = server.getsockname()
        assert address in listening()
        client.connect(address)
        assert client.getsockname() not in listening(), "a connected socket does not listen"
    assert address not in listening()
