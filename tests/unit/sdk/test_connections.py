"""Clients of the stack's own servers use no proxy, and a request to a machine that vanished fails after `GONE_S`."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from pydantic import ValidationError

from gristmill import Client, ConfigError, SyncClient
from gristmill.internal import connections
from gristmill_cli import doctor
from gristmill_cli.local import processes
from gristmill_env.inference.http import ServerHttp
from gristmill_trainer.publish.servers import ModelServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

# Runs in a separate network namespace, whose loopback interface it takes away while a request waits.
_VANISH = """
import fcntl, socket, struct, sys, threading
import httpx
from gristmill.internal import connections

def loopback(up):
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", up))

def accept(listener):
    connection, _ = listener.accept()
    connection.recv(65536)
    loopback(0)
    threading.Event().wait()

loopback(1)
listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=accept, args=(listener,), daemon=True).start()
with connections.client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=600) as client:
    try:
        client.get("/")
    except httpx.TransportError as error:
        print(type(error).__name__)
"""


@pytest.mark.long
def test_request_to_a_machine_that_vanished_fails_before_its_time_out() -> None:
    command = ["unshare", "--net", "--map-root-user", sys.executable, "-c", _VANISH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "ReadTimeout"


OWN = """127.0.0.1 127.1.2.3 [::1] 10.0.0.7 172.20.0.3 192.168.1.9 169.254.1.1 100.64.0.1 [fd00::1] [fe80::1] 0.0.0.0
    localhost api model gpu17 gpu-box.lan host.docker.internal model.gristmill.svc model.x.svc.cluster.local LOCALHOST
    api.localhost box.local api."""
PUBLIC = "api.openai.com 8.8.8.8 [2606:4700::1] huggingface.co local.example.com localhost.example.com"
NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


class Answers(BaseHTTPRequestHandler):
    """A server that answers 200 to everything, or a proxy that refuses everything."""

    status = 200

    def do_GET(self) -> None:
        self.server.seen.append(self.path)  # type: ignore[attr-defined]
        body = b'{"state": "ok", "data": [{"id": "m"}], "is_paused": false}'
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_CONNECT = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Prints nothing."""


class Refuses(Answers):
    status = 403


@contextmanager
def listening(kind: type[Answers]) -> Iterator[tuple[str, list[str]]]:
    """Yields the address and the requested paths of a server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.seen  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(params=["http", "socks5", "socks4", "no scheme"])
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the requests that a proxy received. The environment names the proxy for everything."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with listening(Refuses) as (url, seen):
        address = url.removeprefix("http://")
        other = {"http": url, "no scheme": address}.get(request.param, f"{request.param}://{address}")
        monkeypatch.setenv("HTTP_PROXY", url)
        monkeypatch.setenv("HTTPS_PROXY", other)
        monkeypatch.setenv("ALL_PROXY", other)
        yield seen


@pytest.fixture
def server() -> Iterator[str]:
    with listening(Answers) as (url, _):
        yield url


@pytest.mark.parametrize("host", OWN.split())
def test_own_hosts_need_no_proxy(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://proxy.example:3128")
    assert connections.proxy_for(f"http://{host}:8000/v1") is None
    assert connections.proxy_for(f"https://{host}") is None


@pytest.mark.parametrize("host", PUBLIC.split())
def test_public_hosts_use_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert connections.proxy_for(f"https://{host}") is None
    monkeypatch.setenv("HTTPS_PROXY", "proxy.example:3128")
    monkeypatch.setenv("ALL_PROXY", "http://other.example:3128")
    assert connections.proxy_for(f"https://{host}/v1") == "http://proxy.example:3128"
    assert connections.proxy_for(f"http://{host}") == "http://other.example:3128"
    monkeypatch.setenv("NO_PROXY", host)
    assert connections.proxy_for(f"https://{host}") is None


async def test_no_client_of_the_stack_uses_a_proxy(proxy: list[str], server: str) -> None:
    with SyncClient(server, patience=0.1) as blocking, pytest.raises(ValidationError):
        blocking.get_run("a")  # The server answered, with another body.
    async with Client(server, patience=0.1) as client:
        with pytest.raises(ValidationError):
            await client.get_run("a")
    sampled = ServerHttp(server, api_key=None, timeout=5)
    assert (await sampled.ask("GET", "/v1/models", dict[str, Any]))["data"] == [{"id": "m"}]
    await sampled.close()
    assert ModelServer(server).call("GET", "/health").is_success
    assert processes.answers(f"{server}/readyz")
    assert doctor.port_use(int(server.rpartition(":")[2])) == "ours"
    assert proxy == []


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
def test_health_checks_of_compose_use_no_proxy(proxy: list[str], server: str) -> None:
    services: dict[str, Any] = {}
    for file in ("compose.yaml", "compose/monitoring.yaml"):
        services |= yaml.safe_load((ROOT / file).read_text("utf-8"))["services"]
    checks = [service["healthcheck"]["test"] for service in services.values() if "healthcheck" in service]
    over_http = [check for check in checks if "http://" in check[-1]]
    programs = {re.sub(r"http://[^/]+:\d+/", f"{server}/", check[-1]) for check in over_http if "-c" in check}
    assert len(programs) == 2
    for program in programs:
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert all("-c" in check or check[1:4] == ["wget", "-Y", "off"] for check in over_http)
    assert proxy == []


@pytest.mark.parametrize("named", ["socks5://127.0.0.1:9", "socks4://127.0.0.1:9", "http://proxy:port"])
def test_unusable_proxy_of_a_public_host_is_named(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", named)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    for make in (connections.client, connections.async_client):
        with pytest.raises(ConfigError) as refused:
            make("https://api.openai.com/v1")
        assert (refused.value.code, refused.value.values["proxy"]) == ("proxy_unusable", named)


class _Counting(ThreadingHTTPServer):
    """Counts its connections, and answers a path that begins with /held only after `go_on` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Echo)
        self.connections = 0
        self.held = threading.Semaphore(0)
        self.go_on = threading.Event()

    def finish_request(self, *arguments: Any) -> None:
        self.connections += 1
        super().finish_request(*arguments)


class _Echo(BaseHTTPRequestHandler):
    """Answers with the request's path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, _Counting)
        if self.path.startswith("/held"):
            self.server.held.release()
            self.server.go_on.wait(30)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.path)))
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def counting() -> Iterator[_Counting]:
    with _Counting() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.go_on.set()
        server.shutdown()


async def test_client_without_a_limit_uses_free_connections_again(counting: _Counting) -> None:
    async with connections.async_client(f"http://127.0.0.1:{counting.server_port}", limits=None, timeout=30) as client:
        held = [asyncio.create_task(client.get(f"/held/{number}")) for number in range(30)]
        for _ in held:
            await asyncio.to_thread(counting.held.acquire)
        counting.go_on.set()
        assert [answer.text for answer in await asyncio.gather(*held)] == [f"/held/{number}" for number in range(30)]
        again = await asyncio.gather(*(client.get(f"/{number}") for number in range(30)))
        assert [answer.text for answer in again] == [f"/{number}" for number in range(30)]
        assert counting.connections == 30


async def test_connection_of_a_cancelled_request_gives_its_answer_to_no_other(counting: _Counting) -> None:
    async with connections.async_client(f"http://127.0.0.1:{counting.server_port}", limits=None, timeout=30) as client:
        held = asyncio.create_task(client.get("/held"))
        await asyncio.to_thread(counting.held.acquire)
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        counting.go_on.set()
        assert [(await client.get(f"/{number}")).text for number in range(3)] == ["/0", "/1", "/2"]
        assert counting.connections == 2


@pytest.mark.slow
async def test_request_after_a_cancelled_one_never_waits_for_its_connection(counting: _Counting) -> None:
    """Cancels a request at each of its steps, and twice at once, as a failed neighbour and a time limit do."""
    counting.go_on.set()
    url = f"http://127.0.0.1:{counting.server_port}"
    for turns in range(120):
        async with connections.async_client(url, limits=None, timeout=None) as client:
            tasks = [asyncio.create_task(client.get(f"/{number}")) for number in range(2)]
            for turn in range(turns // 2):
                await asyncio.sleep(0.0005 if turn % 8 == 7 else 0)
            for task in tasks:
                task.cancel()
            if turns % 2:
                await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with asyncio.timeout(60):
                answers = await asyncio.gather(*(client.get(f"/after/{number}") for number in range(2)))
            assert [answer.text for answer in answers] == ["/after/0", "/after/1"]


async def test_cancelled_calls_of_the_client_fill_no_shared_pool() -> None:
    async with Client("http://127.0.0.1:9") as client:
        assert isinstance(client._http._transport, connections._AnyNumber)


def test_client_works_in_one_event_loop_after_another(counting: _Counting) -> None:
    counting.go_on.set()
    client = Client(f"http://127.0.0.1:{counting.server_port}", patience=0)
    for _ in range(2):
        assert asyncio.run(client._http.get("/a")).text == "/a"


def test_idle_connections_are_closed_here_before_uvicorn_closes_them() -> None:
    for limits in (connections._LIMITS, connections._ONE):
        assert limits.keepalive_expiry is not None
        assert limits.keepalive_expiry < uvicorn.Config("app").timeout_keep_alive


async def test_idle_connections_are_closed(counting: _Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_IDLE_S", 0.0)
    async with connections.async_client(f"http://127.0.0.1:{counting.server_port}", limits=None, timeout=30) as client:
        await client.get("/0")
        await client.get("/1")
        assert counting.connections == 2
