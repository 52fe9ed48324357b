"""The real API rejects every request for an unknown host, whichever path the request takes through it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.integration.api.store_harness import RUN
from tests.support.api_server import ApiServer
from tests.support.redis_server import RedisServer

from gristmill import GROUP_MEDIA_TYPE
from gristmill_api import atropos
from gristmill_api.access.permissions import rules

EVIL = "rebind.evil.example:8000"


class Answer(NamedTuple):
    status: int
    headers: str
    body: bytes


def ask(server: ApiServer, method: str, path: str, *headers: str, version: str = "1.1", body: bytes = b"") -> Answer:
    """Sends one request with exactly these headers; an HTTP client would add its own `Host`."""
    lines = [f"{method} {path} HTTP/{version}", *headers, f"Content-Length: {len(body)}", "Connection: close", "", ""]
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall("\r\n".join(lines).encode() + body)
        received = b""
        while part := connection.recv(65536):
            received += part
    head, _, content = received.partition(b"\r\n\r\n")
    first, _, others = head.decode("latin-1").partition("\r\n")
    return Answer(int(first.split()[1]), others.lower(), content)


@pytest.fixture(scope="module")
def server(shared_redis: RedisServer) -> Iterator[ApiServer]:
    with ApiServer(
        shared_redis.api_url,
        API_ALLOWED_HOSTS="gpu-box.lan",
        API_CORS_ORIGINS="http://dash.example",
        API_MAX_WAIT_S="0.01",
    ) as server:
        yield server


def requests() -> Iterator[tuple[str, str]]:
    """Every route, including the fast routes, and a path that does not exist."""
    for method, template, _ in rules():
        yield method, template.replace("{}", RUN, 1).replace("{}", "g00000000")
    yield "GET", "/v1/nothing"
    yield "HEAD", "/healthz"
    yield "POST", "http://localhost/register"


@pytest.mark.parametrize(("method", "path"), list(requests()))
def test_request_for_an_unknown_host_is_refused(redis_url: str, server: ApiServer, method: str, path: str) -> None:
    content_type = GROUP_MEDIA_TYPE if method == "PUT" else "application/json"
    answer = ask(server, method, path, f"Host: {EVIL}", f"Content-Type: {content_type}", body=b"{}")
    assert answer.status == 421
    if method != "HEAD":
        told = json.loads(answer.body)
        told = told if path.rpartition("localhost")[2] in atropos.paths else told["error"]
        assert told["code"] == "host_not_allowed"
        assert ("detail" in told) == (path.rpartition("localhost")[2] in atropos.paths)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "[::1]:8000", "api", "gpu-box.lan:1", "x.localhost"])
def test_request_for_a_known_host_is_answered(redis_url: str, server: ApiServer, host: str) -> None:
    assert ask(server, "GET", "/readyz", f"Host: {host}").status == 200
    assert ask(server, "GET", "/batch", f"Host: {host}").status == 200


def test_request_without_host_is_answered(redis_url: str, server: ApiServer) -> None:
    assert ask(server, "GET", "/readyz", version="1.0").status == 200


def test_second_host_header_does_not_hide_the_first(redis_url: str, server: ApiServer) -> None:
    assert ask(server, "GET", "/readyz", f"Host: {EVIL}", "Host: localhost").status == 421
    assert ask(server, "GET", "/readyz", "Host: localhost", f"Host: {EVIL}").status == 421


def test_websocket_and_preflight_for_an_unknown_host_are_refused(redis_url: str, server: ApiServer) -> None:
    upgrade = ["Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
    assert ask(server, "GET", "/v1/runs", f"Host: {EVIL}", *upgrade).status in (421, 403)
    preflight = ["Origin: http://dash.example", "Access-Control-Request-Method: PUT"]
    assert ask(server, "OPTIONS", "/v1/runs", "Host: localhost", *preflight).status == 200
    refused = ask(server, "OPTIONS", "/v1/runs", f"Host: {EVIL}", *preflight)
    assert refused.status == 421
    assert "access-control" not in refused.headers


def test_refused_request_is_logged_and_counted(redis_url: str, server: ApiServer) -> None:
    ask(server, "DELETE", f"/v1/runs/{RUN}", f"Host: {EVIL}")
    assert "code=host_not_allowed" in server.log()
    counted = ask(server, "GET", "/metrics", "Host: localhost").body.decode()
    assert 'gristmill_api_requests_total{method="DELETE",route="unmatched",status="421"}' in counted


def test_star_allows_every_host_and_is_logged_as_a_warning(shared_redis: RedisServer) -> None:
    with ApiServer(shared_redis.api_url, API_ALLOWED_HOSTS="*") as server:
        assert ask(server, "GET", "/readyz", f"Host: {EVIL}").status == 200
        assert "EVERY HOST IS ALLOWED" in server.log()
