"""A client that sends every request twice, in sequence or both at once, leaves the same contents as a client that sends
every request once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from redis.asyncio import Redis
from tests.support.api_server import ApiServer
from tests.support.grids import rest_is_long
from tests.support.ledger import Ledger
from tests.support.redis_server import RedisServer
from tests.support.scripted_env import serve
from tests.support.scripted_run import ENV, GROUP_SIZE, expected_group, plan
from tests.support.scripted_trainer import Checkpoint, train

from gristmill import GROUP_MEDIA_TYPE, Client

RUN, AT = "run-1", "/v1/runs/run-1"
STEPS = 8

Order = Literal["once", "in turn", "at once"]


class Repeating(httpx.AsyncHTTPTransport):
    """Sends each request twice. The client receives the answer that arrived last."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order
        self.sent = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        if self._order == "once":
            return await self._send(request)
        if self._order == "in turn":
            await self._send(request)
            return await self._send(request)
        last: httpx.Response | None = None
        for answer in asyncio.as_completed([self._send(request), self._send(request)]):
            last = await answer
        assert last is not None
        return last

    async def _send(self, request: httpx.Request) -> httpx.Response:
        self.sent += 1
        answer = await super().handle_async_request(request)
        await answer.aread()
        return answer


@pytest.fixture(scope="module")
def api(shared_redis: RedisServer) -> Iterator[ApiServer]:
    with ApiServer(shared_redis.api_url, API_PERMIT_TTL_S="1", API_MAX_ATTEMPTS="2") as server:
        yield server


async def every_verb(http: httpx.AsyncClient) -> dict[str, Any]:
    """Builds a run with some of every kind of content. Returns everything that is visible of it."""

    async def post(path: str, **body: Any) -> None:
        (await http.post(f"{AT}{path}", json=body)).raise_for_status()

    await http.post("/v1/runs", json={"run_id": RUN, "env": ENV, "group_size": GROUP_SIZE})
    await post("/take", trainer=plan(STEPS, groups_per_step=2, staleness=1), taker="trainer-1")
    incarnation = (await http.get(AT)).json()["incarnation"]
    await post("/version", incarnation=incarnation, step=0)
    await post("/envs", env_id="env-1", weight=1.0)
    claimed = [
        (await http.post(f"{AT}/claims", json={"name": "work", "holder": holder, "ttl": 600})).json()
        for holder in ("env-1", "env-2")
    ]
    await post("/permits", holder="env-1", count=4)
    for group_id in ("g00000000", "g00000001"):
        answer = await http.put(
            f"{AT}/groups/{group_id}?holder=env-1",
            content=expected_group(RUN, group_id).encode(),
            headers={"Content-Type": GROUP_MEDIA_TYPE},
        )
        assert answer.is_success
    await post("/permits/return", holder="env-1", group_id="g00000002", reason="too_long")
    await post("/permits/return", holder="env-1", group_id="g00000003", reason="abandoned")
    await post("/permits/abandon", holder="env-1")
    for batch_id in ("b1", "b2"):  # all attempts of a group
        await post("/lease", incarnation=incarnation, batch_id=batch_id, groups=2)
        await post("/extend", incarnation=incarnation, batch_ids=[batch_id])
        await post("/nack", incarnation=incarnation, batch_ids=[batch_id])
    await post("/lease", incarnation=incarnation, batch_id="b3", groups=1)
    dead = (await http.get(f"{AT}/dead")).json()
    await post("/dead/replay", group_ids=["g00000000"])
    await post("/dead/purge", group_ids=["g00000001"])
    await post("/lease", incarnation=incarnation, batch_id="b4", groups=1)
    await post("/ack", incarnation=incarnation, batch_ids=["b4"])
    await post("/metrics", source="trainer", step=1, values={"loss": 0.5})
    await post("/version", incarnation=incarnation, step=1)
    seen = {
        path: (await http.get(f"{AT}{path}")).raise_for_status().json()
        for path in ("/status", "/groups", "/envs", "/metrics/trainer", "/dead")
    }
    assert (await http.delete(f"{AT}/envs/env-1")).status_code in (204, 404)
    await post("/finish", incarnation=incarnation)
    record = (await http.get(AT)).json()
    for mark in ("created_at", "creation"):
        del record[mark]
    for mark in ("last_submit_s", "last_asked_s", "last_registered_s"):  # seconds ago
        del seen["/status"][mark]
    for environment in seen["/envs"]:
        assert environment.pop("last_seen_s") < 60
    return {
        **seen,
        "record": record,
        "died": dead,
        "claimed": claimed,
        "envs left": (await http.get(f"{AT}/envs")).json(),
    }


@pytest.mark.parametrize("order", rest_is_long("at once", "in turn"))
async def test_every_request_sent_twice_has_the_effect_of_one(redis_url: str, api: ApiServer, order: Order) -> None:
    seen = []
    for how in ("once", order):
        transport = Repeating(how)
        async with httpx.AsyncClient(base_url=api.url, timeout=30, transport=transport) as http:
            seen.append(await every_verb(http))
            if how == "once":
                assert (await http.delete(AT)).is_success
                async with Redis.from_url(redis_url) as client:
                    await client.flushall()  # The fence of the deleted run would shift the incarnations.
    assert seen[0]["died"], "some groups became dead letters"
    assert seen[0] == seen[1]


@pytest.mark.parametrize("order", rest_is_long("in turn", "at once"))
async def test_run_with_repeated_requests_trains_every_group_once(
    redis_url: str, api: ApiServer, tmp_path: Path, order: Order
) -> None:
    acknowledged: list[str] = []
    checkpoint = tmp_path / "checkpoint"

    async with Client(api.url) as client:
        transport = Repeating(order)
        client._http = httpx.AsyncClient(base_url=api.url, transport=transport)
        await client.create_run(RUN, ENV, GROUP_SIZE)
        async with asyncio.TaskGroup() as work:
            for holder in ("env-1", "env-2"):
                work.create_task(serve(client, RUN, holder, acknowledged.append))
            work.create_task(train(client, RUN, checkpoint, STEPS))
        audit = await client.audit(RUN)
    ledger = Ledger.of(acknowledged, Checkpoint.load(checkpoint).trained, audit)
    assert ledger.problems() == {}
    assert len(ledger.lineage) == len(audit.trained) == STEPS * 4
    assert [audit.ready, audit.leased, audit.outstanding] == [[], [], []]
    assert transport.sent > 2 * STEPS * 4
