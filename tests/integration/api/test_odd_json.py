"""JSON that is well formed and still harmful: refused before any of it is stored."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import redis
from tests.integration.api import under_way
from tests.integration.api.store_harness import RUN
from tests.support.api_server import ApiServer
from tests.support.redis_contents import Snapshot, contents, wait_for_archiver
from tests.support.redis_server import RedisServer

from gristmill_api.http.error_handlers import Refusal

HALF_A_PAIR = r'"\ud800"'
ODD = {
    "half a surrogate pair": HALF_A_PAIR,
    "half a pair as a name": f"{{{HALF_A_PAIR}: 1}}",
    "deep": "[" * 300 + "]" * 300,
    "deeper": "[" * 900 + "]" * 900,
    "deepest": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 300 + "1" + "}" * 300,
    "no number": "NaN",
    "infinity": "-Infinity",
    "beyond doubles": "1e999",
    "a number without end": "9" * 5000,
}
AT = f"/v1/runs/{RUN}"
PLACES = {
    "an environment's settings": ("/v1/runs", '{"run_id": "new", "stack": null, "group_size": 2, "env": {"x": %s}}'),
    "a trainer's settings": (
        f"{AT}/take",
        '{"trainer": {"batch_size": 8, "gradient_accumulation_steps": 1, "training_steps": 10, "max_staleness": 3,'
        ' "x": %s}}',
    ),
    "a metric": (f"{AT}/metrics", '{"source": "trainer", "step": 1, "values": {"loss": %s}}'),
    "an id": (f"{AT}/permits", '{"holder": %s}'),
    "a step": (f"{AT}/version", '{"incarnation": 2, "step": %s}'),
}


@pytest.fixture(scope="module")
def api(shared_redis: RedisServer) -> Iterator[ApiServer]:
    with ApiServer(shared_redis.api_url, **under_way.LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def seeded(api: ApiServer, shared_redis: RedisServer) -> Iterator[Snapshot]:
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
        under_way.put_under_way(api.url)
        wait_for_archiver(client)
        yield Snapshot(client)


@pytest.fixture
def store(seeded: Snapshot) -> redis.Redis:
    seeded.put_back()
    return seeded.client


@pytest.mark.parametrize("place", PLACES)
def test_odd_values_are_refused_and_nothing_is_kept(store: redis.Redis, api: ApiServer, place: str) -> None:
    path, body = PLACES[place]
    before = contents(store)
    with httpx.Client(base_url=api.url, headers={"Content-Type": "application/json"}, timeout=30) as http:
        for what, value in ODD.items():
            answer = http.post(path, content=body % value)
            assert answer.status_code in (400, 409, 422), (what, answer.text[:500])
            assert Refusal.model_validate(answer.json()).error.message
            assert contents(store) == before, what
        runs = http.get("/v1/runs").raise_for_status().json()
        assert {run["run_id"] for run in runs} == {RUN, under_way.FINISHED}
        http.get("/metrics").raise_for_status()


@pytest.mark.parametrize("step", ["true", '"1"', "1.5", str(2**53 + 1), "1" + "0" * 400, "-1"])
def test_version_refuses_a_step_that_is_not_a_reasonable_whole_number(
    store: redis.Redis, api: ApiServer, step: str
) -> None:
    body = f'{{"incarnation": 2, "step": {step}}}'
    at = f"{api.url}{AT}/version"
    assert httpx.post(at, content=body, headers={"Content-Type": "application/json"}).status_code == 422
    for fine in (3.0, 2**53):
        assert httpx.post(at, json={"incarnation": 2, "step": fine}).status_code == 200
    httpx.get(f"{api.url}/metrics").raise_for_status()
