"""Connections to Redis: each command receives its own answer, also after an abandoned command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import hiredis
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError, TimeoutError  # noqa: A004
from tests.support.api_server import ApiServer
from tests.support.errors import raises
from tests.support.fault_proxy import Fault, FaultProxy, Way
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer, admin_url

from gristmill import ConfigError
from gristmill_api import notifications
from gristmill_api.metrics import Metrics
from gristmill_api.notifications import Notifications
from gristmill_api.store import keys
from gristmill_api.store.connection import ask, check_server, connect


@asynccontextmanager
async def connected(url: str, options: str) -> AsyncIterator[Redis]:
    client = connect(f"{url}?{options}", {})
    try:
        yield client
    finally:
        await client.aclose()


async def test_command_waits_for_a_connection_if_all_are_in_use(redis_url: str) -> None:
    async with connected(redis_url, "max_connections=2&timeout=5&client_name=pool") as client:
        await asyncio.gather(*(client.blpop(["nothing"], timeout=0.2) for _ in range(6)))
        assert [found["name"] for found in await client.client_list()].count("pool") == 2


async def test_command_fails_if_no_connection_is_free_within_the_timeout(redis_url: str) -> None:
    async with connected(redis_url, "max_connections=1&timeout=0.1") as client:
        busy = asyncio.ensure_future(client.blpop(["nothing"], timeout=1))
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionError, match="No connection available"):
            await client.ping()
        await busy
        assert await client.ping()


async def test_abandoned_answer_never_reaches_a_later_command(redis_url: str) -> None:
    async with connected(redis_url, "max_connections=1&socket_timeout=0.2") as client:
        pool = client.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        with pytest.raises(TimeoutError, match=r"no answer in 0\.2 s"):
            await ask(connection, [("BLPOP", "list", 1)])
        await pool.release(connection)
        again = await pool.get_connection()  # type: ignore[no-untyped-call]
        cancelled = asyncio.create_task(ask(again, [("BLPOP", "list", 1)]))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await pool.release(again)
        assert await client.echo("mine") == b"mine"
        assert connection.socket_timeout == 0.2, "as it was"


async def test_cancelled_task_stops_during_a_redis_command(redis_url: str) -> None:
    """redis-py's own client waits with `asyncio.wait_for`, which loses a cancellation in Python 3.11 if the command was
    sent at that moment."""
    async with connect(redis_url, {}) as redis:

        async def work() -> None:
            while True:
                await redis.ping()

        for turns in range(300):
            task = asyncio.create_task(work())
            for _ in range(turns % 40):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=10)
            assert done, f"the task continues after a cancellation in turn {turns % 40}"


async def test_refused_command_leaves_the_other_answers_of_its_pipeline_intact(redis_url: str) -> None:
    async with connected(redis_url, "max_connections=1") as client:
        pool = client.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        first, second, third = await ask(connection, [("SET", "a", 1), ("HGET", "a", "b"), ("GET", "a")])
        await pool.release(connection)
        assert first in (b"OK", True)
        assert isinstance(second, ResponseError)
        assert third == b"1"


async def test_client_reconnects_after_a_redis_restart() -> None:
    with RedisServer() as server:
        async with connected(server.url, "max_connections=1") as client:
            assert await client.ping()
            server.restart()
            await asyncio.sleep(0.05)  # the loop learns that the old connection is closed
            assert await client.ping(), "the connection was seen to be closed before it was used"


@asynccontextmanager
async def old_redis(version: str | None, port: int) -> AsyncIterator[str]:
    """A server that answers as an old Redis does, because no old Redis is installed. None: the server has no HELLO."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = hiredis.Reader()
        while data := await reader.read(4096):
            commands.feed(data)
            while command := _next(commands):
                if command[0].upper() != b"HELLO":
                    writer.write(b"+OK\r\n")
                elif version is None:
                    writer.write(b"-ERR unknown command `HELLO`\r\n")
                else:
                    writer.write(_packed("server", "redis", "version", version))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port):
        yield f"redis://127.0.0.1:{port}/0"


def _packed(*words: str) -> bytes:
    return f"*{len(words)}\r\n".encode() + b"".join(f"${len(word)}\r\n{word}\r\n".encode() for word in words)


def _next(commands: hiredis.Reader) -> list[bytes]:
    found: Any = commands.gets()
    return found or []


@pytest.mark.parametrize(("version", "named"), [("6.2.14", "redis 6.2.14"), (None, "Redis 5 or older")])
async def test_api_does_not_start_on_an_old_redis(version: str | None, named: str) -> None:
    async with old_redis(version, free_port()) as url:
        async with connected(url, "") as client:
            with raises(ConfigError, "redis_unsuitable") as refused:
                await check_server(client)
            assert named in str(refused.value)
        with pytest.raises(RuntimeError, match=named):
            await asyncio.to_thread(ApiServer(url).start)


async def test_api_does_not_start_on_a_redis_cluster() -> None:
    # By default, a cluster also listens on its port plus 10000, which another process may have.
    cluster = RedisServer("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with cluster as server, pytest.raises(RuntimeError, match="is a Redis Cluster"):
        await asyncio.to_thread(ApiServer(server.api_url).start)


async def test_check_server_accepts_redis_7(redis_url: str, shared_redis: RedisServer) -> None:
    async with connected(shared_redis.api_url, "") as client:
        await check_server(client)
    async with old_redis("7.0.0", free_port()) as url, connected(url, "") as client:
        await check_server(client)


async def test_api_reports_an_old_redis_that_appears_after_its_start() -> None:
    port = free_port()
    with ApiServer(f"redis://127.0.0.1:{port}/0") as api:
        assert "FAILED" not in api.log()
        async with old_redis("6.2.14", port):
            for _ in range(200):
                if "THE BACKGROUND TASK 'watch-redis' FAILED" in api.log():
                    break
                await asyncio.sleep(0.1)
        assert "the API needs Redis 7.0" in api.log()


async def test_listener_notices_a_connection_that_went_silent(
    redis: Redis, shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "_IDLE_S", 0.3)
    metrics, waiting = Metrics(None), Notifications()

    async def up(value: float) -> None:
        while metrics.registry.get_sample_value("gristmill_api_redis_up") != value:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    with FaultProxy(shared_redis.port) as proxy:
        async with connected(admin_url(proxy.port), "socket_timeout=0.5") as client:
            with waiting.listening("topic") as woken:
                listener = asyncio.create_task(notifications.listen_to_redis(client, waiting, metrics))
                await asyncio.wait_for(woken.wait(), 20)  # It is subscribed, and sends no other commands to Redis.
            assert metrics.registry.get_sample_value("gristmill_api_redis_up") == 1
            proxy.set(Fault(answer=Way(swallow=True)))
            await up(0)
            proxy.heal()
            await up(1)
            with waiting.listening("topic") as woken:
                await redis.publish(keys.EVENTS, "topic")
                await asyncio.wait_for(woken.wait(), 20)
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
