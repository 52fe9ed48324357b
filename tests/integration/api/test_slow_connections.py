"""Connections without a complete request end, and cannot keep other clients out. Real sockets, and no token."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.api_server import ApiServer
from tests.support.redis_server import RedisServer

LINE = b"GET /healthz HTTP/1.1\r\n"
WHOLE = LINE + b"Host: localhost\r\n\r\n"
# The API answers before it reads the body, because no such route exists.
REFUSED = b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n"


@pytest.fixture(scope="module")
def api(shared_redis: RedisServer) -> Iterator[ApiServer]:
    with ApiServer(shared_redis.api_url, API_REQUEST_TIMEOUT_S="1.5") as server:
        yield server


def sent_until_closed(port: int, first: bytes, then: bytes) -> bytes:
    """Sends `first`, then `then` ten times a second. Returns what the server has sent when it closes the connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=0.1) as connection:
        connection.sendall(first)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                part = connection.recv(65536)
                if not part:
                    return received
                received += part
            except TimeoutError:
                with contextlib.suppress(OSError):
                    connection.sendall(then)
            except ConnectionError:
                return received
    raise AssertionError(f"the server kept the connection; it sent {received[:300]!r}")


@pytest.mark.parametrize(
    ("first", "then", "answer"),
    [
        (b"", b"", b""),
        (LINE, b"", b""),
        (LINE, b"X: y\r\n", b""),
        (LINE, b"X: " + b"y" * 20_000 + b"\r\n", b""),
        (b"GET /", b"a", b""),
        (b"", b"\r\n", b""),
        (WHOLE, b"\r\n", b"HTTP/1.1 200 OK"),
        (WHOLE + LINE, b"X: y\r\n", b"HTTP/1.1 200 OK"),
        (REFUSED, b"x", b"HTTP/1.1 404 Not Found"),
    ],
    ids=["silent", "half head", "slow head", "endless head", "slow line", "blank lines", "blank lines after a request",
         "slow second request", "slow body of an answered request"],
)  # fmt: skip
def test_connection_without_a_complete_request_is_closed(
    api: ApiServer, first: bytes, then: bytes, answer: bytes
) -> None:
    assert sent_until_closed(api.port, first, then).partition(b"\r\n")[0] == answer


@pytest.mark.usefixtures("redis_url")  # Empties Redis: no run is open.
def test_client_with_complete_requests_keeps_its_connection(api: ApiServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
    connection.auto_open = 0  # The client does not connect again.
    connection.connect()
    for pause in (0, 2.5):
        time.sleep(pause)
        connection.request("GET", "/v1/open?wait=2.5")
        response = connection.getresponse()
        assert (response.status, response.read()) == (204, b"")
        connection.request("POST", "/v1/nothing", body=bytes(900_000))
        response = connection.getresponse()
        assert response.status == 404
        response.read()
    connection.close()


def test_unfinished_requests_leave_room_for_others(shared_redis: RedisServer) -> None:
    """The API raises its limit of open files, refuses requests beyond it with 503, and recovers without a restart."""
    environ = {"API_REQUEST_TIMEOUT_S": "10"}
    with ApiServer(shared_redis.api_url, None, None, (64, 260), **environ) as server, contextlib.ExitStack() as stack:
        limits = Path(f"/proc/{server.pid}/limits").read_text()
        assert limits.split("Max open files")[1].split()[:2] == ["260", "260"]
        for _ in range(100):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(LINE)
        statuses = []
        while (status := httpx.get(f"{server.url}/healthz", timeout=30).status_code) != 200:
            statuses.append(status)
            threading.Event().wait(0.1)
        assert set(statuses) == {503}
        assert "Too many open files" not in server.log()
