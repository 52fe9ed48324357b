"""A background task that fails is visible and is started again, in the real API."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis
from tests.integration.api.test_archive import Loop, empty, ids, until
from tests.support.api_server import ApiServer

from gristmill import Client
from gristmill_api.store import keys

NOT_UTF_8 = b"\xff"


@pytest.fixture
def api(redis_url: str, tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as api:
        yield api


@pytest.fixture
async def http(api: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api.url, timeout=30) as http:
        yield http


async def task(http: httpx.AsyncClient, metric: str, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    values = [line.split()[1] for line in lines if line.startswith(f'gristmill_api_task_{metric}{{task="{name}"}}')]
    return float(values[0]) if values else 0


async def test_archiver_that_fails_is_visible_and_starts_again(
    redis: Redis, api: ApiServer, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with Client(api.url, patience=60) as client:
        loop = Loop(client)
        await loop.start()
        assert await task(http, "up", "archive") == 1
        await redis.zadd(keys.RUNS, {NOT_UTF_8: 1})  # no run id

        async def down() -> bool:
            return await task(http, "up", "archive") == 0

        await until(down)
        assert await task(http, "failures_total", "archive") >= 1
        assert "THE BACKGROUND TASK 'archive' FAILED" in api.log()
        assert "UnicodeDecodeError" in api.log()
        await loop.step(2)
        assert (await http.get("/readyz")).status_code == 200, "groups are stored and leased all the same"

        await redis.zrem(keys.RUNS, NOT_UTF_8)
        await until(functools.partial(empty, redis))
        assert ids(tmp_path) == [group.group_id for group in loop.sent]
        assert await task(http, "up", "archive") == 1


async def test_damage_of_one_run_stops_neither_the_archiver_nor_another_run(
    redis: Redis, api: ApiServer, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with Client(api.url, patience=60) as client:
        damaged, whole = Loop(client, run_id="damaged"), Loop(client)
        await damaged.start()
        await redis.rpush(keys.archive("damaged"), NOT_UTF_8)  # no group id

        async def failed() -> bool:
            return await task(http, "failures_total", "archive") >= 1

        await until(failed)
        assert "UnicodeDecodeError" in api.log()
        await damaged.step(2)
        await whole.start()
        await whole.step(2)
        await until(functools.partial(empty, redis))
        assert ids(tmp_path) == [group.group_id for group in whole.sent]
        assert not (tmp_path / "damaged" / "rollouts").exists()
        assert await task(http, "up", "archive") == 1

        await redis.lrem(keys.archive("damaged"), 0, NOT_UTF_8)  # type: ignore[arg-type]  # bytes are as good
        await until(functools.partial(empty, redis, "damaged"))
        assert ids(tmp_path, "damaged") == [group.group_id for group in damaged.sent]


async def test_watcher_that_fails_starts_again(redis: Redis, api: ApiServer, http: httpx.AsyncClient) -> None:
    """This task wakes waiting requests at the moment of the change."""

    async def listeners() -> int:
        ((_, count),) = await redis.pubsub_numsub(keys.EVENTS)
        return int(count)

    async def listening() -> bool:
        return await listeners() == 1

    await until(listening)
    await redis.publish(keys.EVENTS, NOT_UTF_8)

    async def failed() -> bool:
        return await task(http, "failures_total", "watch-redis") == 1

    await until(failed)
    assert "THE BACKGROUND TASK 'watch-redis' FAILED" in api.log()
    await until(listening)
    assert await task(http, "up", "watch-redis") == 1


async def test_failing_task_does_not_delay_the_end_of_the_process(
    redis: Redis, api: ApiServer, http: httpx.AsyncClient
) -> None:
    await redis.zadd(keys.RUNS, {NOT_UTF_8: 1})  # no run id

    async def failed() -> bool:
        return await task(http, "failures_total", "archive") >= 2

    await until(failed)
    await asyncio.to_thread(api.stop)
    assert "Finished server process" in api.log()
