"""GET on /v1 changes nothing: Redis counts every write, and counts none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from redis.asyncio import Redis
from tests.integration.api.bench import RUN, trainer
from tests.support.api_server import ApiServer
from tests.support.groups import make_group
from tests.support.redis_server import RedisServer

from gristmill import Client, PolicyVersion
from gristmill_api.app import create_app
from gristmill_api.settings import Settings
from gristmill_api.store import keys


def _reading() -> list[str]:
    """Templates of every GET on /v1 that the application has."""
    routes = list(iter_route_contexts(create_app(Settings()).routes))
    found = [route.path for route in routes if "GET" in (route.methods or ())]
    return [path for path in found if path is not None and path.startswith("/v1")]


@pytest.fixture(scope="module")
def api(shared_redis: RedisServer) -> Iterator[ApiServer]:
    with ApiServer(shared_redis.api_url, API_LEASE_TTL_S="0.1", API_PERMIT_TTL_S="0.1") as server:
        yield server


async def _writes(redis: Redis) -> int:
    """Changes to the data since Redis started; nothing saves a snapshot meanwhile."""
    return int((await redis.info("persistence"))["rdb_changes_since_last_save"])


async def test_no_get_writes(redis_url: str, api: ApiServer, redis: Redis) -> None:
    """In a run that has something of everything, a lease and a permit that ran out unnoticed among it."""
    async with Client(api.url, patience=10) as client:
        await client.create_run(RUN, {"dataset": "d"}, 2)
        incarnation, _ = await client.take(RUN, trainer(), [])
        await client.record_version(RUN, PolicyVersion(incarnation, 0))
        for row in range(3):
            (permit,) = (await client.permits(RUN, "env-1", 1, wait=5)).permits
            await client.submit(make_group(permit.group_id, RUN, seed=row), "env-1")
        await client.permits(RUN, "env-1", 1, wait=0)
        await client.register_env(RUN, "env-1", weight=1.0)
        await client.report_metrics(RUN, "trainer", 1, {"loss": 1.0})
        await client.lease(RUN, incarnation, "b1", 1, wait=0)
    for due in ("leases", "permits"):
        while True:
            first: Any = await redis.zrange(keys.prefix(RUN) + due, 0, 0, withscores=True)
            now: Any = await redis.time()
            if now[0] * 1000 > float(first[0][1]):
                break
    names = {"run_id": RUN, "group_id": permit.group_id, "env_id": "env-1", "source": "trainer"}
    reading = _reading()
    assert len(reading) >= 5
    before = await _writes(redis)
    async with httpx.AsyncClient(base_url=api.url, timeout=30) as http:
        for template in reading:
            async with http.stream("GET", template.format(**names)) as answer:
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):  # that one has no end
                    await answer.aread()
                assert answer.status_code < 400, f"{template}: {answer.status_code}"
            assert await _writes(redis) == before, f"GET {template} wrote"
    assert before > 0
