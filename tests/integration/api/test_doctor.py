"""The doctor's check of Redis: its durability, over TCP, TLS and a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.redis_server import ADMIN, RedisServer

from gristmill.internal.check import Check
from gristmill_api.doctor import before_run, check_redis
from gristmill_api.settings import Settings


def checked(url: str) -> Check:
    settings = dataclasses.replace(Settings.read({}), redis_url=url)
    (found,) = asyncio.run(check_redis(settings))
    assert found.name == "redis"
    return found


@pytest.mark.parametrize(
    ("options", "state"),
    [
        ((), "ok"),
        (("--appendonly", "no"), "failed"),
        (("--appendfsync", "everysec"), "failed"),
        (("--maxmemory-policy", "allkeys-lru"), "failed"),
    ],
)
def test_redis_that_may_lose_groups_fails(options: tuple[str, ...], state: str) -> None:
    with RedisServer(*options) as server:
        assert checked(server.url).state == state


def test_redis_whose_settings_are_hidden_or_that_is_away_is_a_warning() -> None:
    with RedisServer() as server:
        assert checked(server.api_url).state == "warning", "the API's user may not read settings"
    assert checked(server.url).state == "warning"


@pytest.mark.parametrize(("fsync", "state"), [("always", "ok"), ("everysec", "failed")])
def test_redis_behind_a_unix_socket_is_checked(tmp_path: Path, fsync: str, state: str) -> None:
    socket = tmp_path / "redis.sock"
    with RedisServer("--unixsocket", str(socket), "--appendfsync", fsync):
        assert checked(f"unix://{ADMIN}:{ADMIN}@{socket}?db=0").state == state


@contextlib.asynccontextmanager
async def tls_before(server: RedisServer, folder: Path) -> AsyncIterator[tuple[int, Path]]:
    """Decrypts connections before a Redis, because the tests' Redis is built without TLS. Yields port and certificate.

    A hosted Redis often has such a proxy.
    """
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_redis = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(copy(reader, to_redis), copy(there, writer))

    proxy = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    async with proxy:
        yield proxy.sockets[0].getsockname()[1], certificate


@pytest.mark.parametrize(("fsync", "state"), [("always", "ok"), ("everysec", "failed")])
async def test_redis_over_tls_is_checked(tmp_path: Path, fsync: str, state: str) -> None:
    with RedisServer("--appendfsync", fsync) as server:
        async with tls_before(server, tmp_path) as (port, certificate):
            url = f"rediss://{ADMIN}:{ADMIN}@127.0.0.1:{port}/0"
            found = await asyncio.to_thread(checked, f"{url}?ssl_ca_certs={certificate}")
            unknown = await asyncio.to_thread(checked, url)
    assert found.state == state
    assert unknown.state == "warning", "no authority signed the certificate"


def test_wrong_variable_of_the_api_fails() -> None:
    (found,) = before_run("quickstart", {"REDIS_URL": "http://127.0.0.1"})
    assert (found.name, found.state) == ("redis", "failed")
