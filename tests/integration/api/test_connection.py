"""Connections to Redis: each command hears its own answer, also after one that was given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError, TimeoutError  # noqa: A004
from tests.support.redis_server import RedisServer

from gristmill_api.store.connection import ask, connect


@asynccontextmanager
async def connected(url: str, options: str) -> AsyncIterator[Redis]:
    client = connect(f"{url}?{options}", {})
    try:
        yield client
    finally:
        await client.aclose()


async def test_who_finds_every_connection_in_use_waits_for_one(redis_url: str) -> None:
    async with connected(redis_url, "max_connections=2&timeout=5") as client:
        await asyncio.gather(*(client.blpop(["nothing"], timeout=0.2) for _ in range(6)))
        assert len(client.connection_pool._available_connections) == 2


async def test_but_not_for_ever(redis_url: str) -> None:
    async with connected(redis_url, "max_connections=1&timeout=0.1") as client:
        busy = asyncio.ensure_future(client.blpop(["nothing"], timeout=1))
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionError, match="No connection available"):
            await client.ping()
        await busy
        assert await client.ping()


async def test_an_answer_that_was_not_waited_for_is_heard_by_nobody(redis_url: str) -> None:
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


async def test_one_refused_command_takes_only_its_own_answer(redis_url: str) -> None:
    async with connected(redis_url, "max_connections=1") as client:
        pool = client.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        first, second, third = await ask(connection, [("SET", "a", 1), ("HGET", "a", "b"), ("GET", "a")])
        await pool.release(connection)
        assert first in (b"OK", True)
        assert isinstance(second, ResponseError)
        assert third == b"1"


async def test_a_redis_that_was_killed_in_between_is_found_again() -> None:
    with RedisServer() as server:
        async with connected(server.url, "max_connections=1") as client:
            assert await client.ping()
            server.restart()
            await asyncio.sleep(0.05)  # the loop hears that the old one is closed
            assert await client.ping(), "the connection was seen to be closed before it was used"
