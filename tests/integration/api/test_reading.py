"""GET on /v1 changes nothing: Redis holds afterwards what it held before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
from fastapi.routing import iter_route_contexts
from tests.integration.api.store_harness import RUN, trainer
from tests.support.api_server import ApiServer
from tests.support.groups import make_group
from tests.support.redis_contents import contents, wait_for_archiver
from tests.support.redis_server import RedisServer

from gristmill import PolicyVersion, SyncClient
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


def test_get_requests_never_write_to_redis(redis_url: str, api: ApiServer) -> None:
    """A run with every kind of content, including a lease and a permit that expired unnoticed."""
    with SyncClient(api.url, patience=10) as client:
        client.create_run(RUN, {"dataset": "d"}, 2)
        incarnation, _ = client.take(RUN, trainer(), [])
        client.record_version(RUN, PolicyVersion(incarnation, 0))
        for row in range(3):
            (permit,) = client.permits(RUN, "env-1", 1, wait=5).permits
            client.submit(make_group(permit.group_id, RUN, seed=row), "env-1")
        client.permits(RUN, "env-1", 1, wait=0)
        client.report_metrics(RUN, "trainer", 1, {"loss": 1.0})
        client.lease(RUN, incarnation, "b1", 1, wait=0)
    names = {"run_id": RUN, "group_id": permit.group_id, "env_id": "env-1", "source": "trainer"}
    reading = _reading()
    assert len(reading) > 10
    with redis.Redis.from_url(redis_url) as store, httpx.Client(base_url=api.url, timeout=30) as http:
        http.post(f"/v1/runs/{RUN}/envs", json={"env_id": "env-1", "weight": 1.0}).raise_for_status()
        _wait_until_all_ran_out(store)
        wait_for_archiver(store)
        before = contents(store)
        assert any("leases" in name for name in before)
        for template in reading:
            with http.stream("GET", template.format(**names)) as answer:
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):  # the stream has no end
                    answer.read()
                assert answer.status_code < 400, f"{template}: {answer.status_code}"
            assert contents(store) == before, f"GET {template} wrote"


def _wait_until_all_ran_out(store: redis.Redis) -> None:
    deadlines: list[float] = []
    for due in ("leases", "permits"):
        found: Any = store.zrange(keys.prefix(RUN) + due, 0, -1, withscores=True)
        assert found
        deadlines += [deadline for _, deadline in found]
    while True:
        now: Any = store.time()
        if now[0] * 1000 > max(deadlines):
            return
