"""Redis at its maxmemory: submitters wait, all other calls continue, and every group arrives in the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import redis
from tests.support.api_server import ApiServer
from tests.support.groups import make_group
from tests.support.redis_server import RedisServer
from tests.support.scripted_run import ENV, GROUP_SIZE, plan

from gristmill import GROUP_MEDIA_TYPE, Client, PolicyVersion, TrajectoryGroup

RUN, AT = "run-1", "/v1/runs/run-1"
GROUPS, PER_STEP = 120, 8


def large(group_id: str) -> TrajectoryGroup:
    """100 kB; all of them together are three times as large as Redis' room."""
    return make_group(group_id, RUN, lengths=((3, 6000),) * 2, seed=int(group_id[1:]))


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer("--maxmemory", "5mb", "--maxmemory-policy", "noeviction") as server:
        yield server


@pytest.fixture(scope="module")
def api(server: RedisServer) -> Iterator[ApiServer]:
    with ApiServer(server.url) as api:
        yield api


def fill_to_the_brim(server: RedisServer) -> None:
    """Redis counts the bytes of the command that it is receiving, so it refuses a large submit and accepts an ack. From
    here on Redis is far over its limit, and refuses every command that it may refuse."""
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] - 500_000)


@pytest.fixture
async def clients(api: ApiServer) -> AsyncIterator[tuple[Client, httpx.AsyncClient]]:
    async with Client(api.url, patience=60) as client, httpx.AsyncClient(base_url=api.url) as http:
        yield client, http


async def test_run_three_times_the_size_of_redis_delivers_every_group(
    server: RedisServer, clients: tuple[Client, httpx.AsyncClient]
) -> None:
    client, http = clients
    refusals: list[httpx.Response] = []

    told_full = asyncio.Event()

    async def keep(answer: httpx.Response) -> None:
        if answer.status_code == 429:
            refusals.append(answer)
            told_full.set()
        else:
            assert answer.is_success

    client._http.event_hooks["response"].append(keep)
    await client.create_run(RUN, ENV, GROUP_SIZE)
    incarnation, _ = await client.take(RUN, plan(GROUPS // PER_STEP, PER_STEP, staleness=100), [])
    await client.record_version(RUN, PolicyVersion(incarnation, 0))
    ids = [permit.group_id for permit in (await client.permits(RUN, "env-1", GROUPS, wait=0)).permits]
    assert len(ids) == GROUPS
    full = asyncio.Event()

    async def submit(mine: list[str]) -> None:
        for group_id in mine:
            await client.submit(large(group_id), "env-1")

    async def watch() -> None:
        """The calls that continue although Redis is full."""
        await told_full.wait()
        fill_to_the_brim(server)
        await client.record_version(RUN, PolicyVersion(incarnation, 1))
        await client.renew_permits(RUN, "env-1", ids)
        row = {"source": "trainer", "step": 1, "values": {"loss": 1.0}}
        for path, body in {
            f"{AT}/permits": {"holder": "env-2", "count": 1},
            f"{AT}/envs": {"env_id": "env-2"},
            f"{AT}/metrics": row,
            "/v1/runs": {"run_id": "run-2", "env": ENV, "group_size": GROUP_SIZE, "stack": None},
        }.items():
            assert (await http.post(path, json=body)).is_success, path
        for path in ("/readyz", f"{AT}/status", f"{AT}/groups", "/metrics"):
            assert (await http.get(path)).status_code == 200, path
        full.set()

    async def train() -> list[str]:
        await full.wait()
        trained: list[str] = []
        for step in range(2, 2 + GROUPS // PER_STEP):
            batch = await client.lease(RUN, incarnation, f"b{step}", PER_STEP, wait=30)
            assert batch is not None
            assert [group.encode() for group in batch] == [large(group.group_id).encode() for group in batch]
            await client.extend(RUN, incarnation, [f"b{step}"])
            await client.ack(RUN, incarnation, [f"b{step}"])
            trained += [group.group_id for group in batch]
        return trained

    async with asyncio.TaskGroup() as work:
        for start in range(4):
            work.create_task(submit(ids[start::4]))
        work.create_task(watch())
        training = work.create_task(train())

    assert sorted(training.result()) == ids
    assert (await client.audit(RUN)).trained == ids
    for answer in refusals:
        assert answer.json()["error"]["code"] == "store_full"
        assert int(answer.headers["Retry-After"]) >= 1


async def test_submit_refused_for_lack_of_memory_leaves_nothing_behind(
    server: RedisServer, clients: tuple[Client, httpx.AsyncClient]
) -> None:
    client, http = clients
    await client.close_run(RUN)
    await client.create_run("run-3", ENV, GROUP_SIZE)
    incarnation, _ = await client.take("run-3", plan(10, 100, staleness=1), [])
    await client.record_version("run-3", PolicyVersion(incarnation, 0))
    ids = [permit.group_id for permit in (await client.permits("run-3", "env-1", 100, wait=0)).permits]
    stored = 0
    while True:
        body = make_group(ids[stored], "run-3", lengths=((3, 6000),) * 2).encode()
        answer = await http.put(
            f"/v1/runs/run-3/groups/{ids[stored]}?holder=env-1",
            content=body,
            headers={"Content-Type": GROUP_MEDIA_TYPE},
        )
        if answer.status_code == 429:
            break
        assert answer.status_code == 201
        stored += 1
    status = await client.status("run-3")
    assert (status.ready, status.outstanding, status.bytes) == (stored, 100 - stored, stored * len(body))
    assert (await http.get(f"/v1/runs/run-3/groups/{ids[stored]}")).status_code == 404
    with redis.Redis.from_url(server.url) as admin:
        assert not list(admin.scan_iter("*:sent:*")), "a refused body does not block the next one"
