"""Redis stops and comes back; the API is killed. No change that was answered with 2xx is lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import httpx
import pytest
from tests.integration.api.store_harness import RUN, trainer
from tests.support.api_server import ApiServer
from tests.support.grids import rest_is_long
from tests.support.groups import make_group
from tests.support.redis_server import PASSWORD, RedisServer

from gristmill import GROUP_MEDIA_TYPE, Client, PolicyVersion
from gristmill_cli.local.redis_acl import USER

AT = f"/v1/runs/{RUN}"
SOCKET = "redis.sock"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer("--unixsocket", SOCKET) as server:
        yield server


@pytest.fixture
def api(server: RedisServer, request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    """An API that connects over TCP, or over the Unix socket that the containers use."""
    over_socket = f"unix://{USER}:{PASSWORD}@{server.folder}/{SOCKET}"
    with ApiServer(over_socket if getattr(request, "param", "tcp") == "unix" else server.api_url) as api:
        yield api


over_both = pytest.mark.parametrize("api", rest_is_long("tcp", "unix"), indirect=True)


async def start(client: Client) -> int:
    await client.create_run(RUN, {"dataset": "d"}, 2)
    incarnation, _ = await client.take(RUN, trainer(steps=100, groups=8), [])
    await client.record_version(RUN, PolicyVersion(incarnation, 0))
    return incarnation


async def answers(url: str) -> dict[str, httpx.Response]:
    """Calls every endpoint once."""
    posts = {
        "/v1/runs": {"run_id": RUN, "env": {"dataset": "d"}, "group_size": 2},
        f"{AT}/take": {"trainer": trainer(steps=100, groups=8)},
        f"{AT}/version": {"incarnation": 1, "step": 0},
        f"{AT}/finish": {"incarnation": 1},
        f"{AT}/permits": {"holder": "e", "count": 1},
        f"{AT}/permits/renew": {"holder": "e"},
        f"{AT}/permits/return": {"holder": "e", "group_id": "g00000000", "reason": "abandoned"},
        f"{AT}/permits/abandon": {"holder": "e"},
        f"{AT}/lease": {"incarnation": 1, "batch_id": "b", "groups": 1},
        f"{AT}/extend": {"incarnation": 1, "batch_ids": ["b"]},
        f"{AT}/ack": {"incarnation": 1, "batch_ids": ["b"]},
    }
    gets = ("/readyz", "/v1/open", "/v1/runs", AT, f"{AT}/status", f"{AT}/groups")
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        group = make_group("g00000000", RUN).encode()
        found = {path: await http.post(path, json=body) for path, body in posts.items()}
        found |= {path: await http.get(path) for path in gets}
        found["submit"] = await http.put(
            f"{AT}/groups/g00000000?holder=env-1", content=group, headers={"Content-Type": GROUP_MEDIA_TYPE}
        )
    return found


@over_both
async def test_every_endpoint_returns_503_without_redis_and_recovers_by_itself(
    server: RedisServer, api: ApiServer
) -> None:
    async with Client(api.url, patience=20) as client:
        await start(client)
        server.kill()
        for path, answer in (await answers(api.url)).items():
            assert answer.status_code == 503, path
            assert answer.json()["error"]["code"] == "store_unavailable", path
            assert answer.headers["retry-after"] == "1"
        async with httpx.AsyncClient(base_url=api.url) as http:
            assert (await http.get("/healthz")).status_code == 200
            assert "gristmill_api_redis_up 0.0" in (await http.get("/metrics")).text
            server.start()
            assert (await http.get("/readyz")).status_code == 200
        assert (await client.get_run(RUN)).incarnation == 1
        assert len((await client.permits(RUN, "env-1", 4, wait=0)).permits) == 4, "its scripts are loaded again"
    for _ in range(200):  # the watching task tries every half second
        if "redis state=up" in (log := api.log()):
            break
        await asyncio.sleep(0.1)
    assert "redis state=up" in log
    assert log.count("redis state=down") == 1, "logged once, not once per request"
    assert "Traceback" not in log


def test_hanging_redis_gives_503(server: RedisServer, api: ApiServer) -> None:
    assert httpx.get(f"{api.url}/readyz").status_code == 200
    server.pause()
    answer = httpx.get(f"{api.url}/v1/runs", timeout=30)
    server.resume()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    assert httpx.get(f"{api.url}/v1/runs").status_code == 200


def test_api_starts_without_redis_and_serves_when_redis_appears() -> None:
    server = RedisServer()
    with ApiServer(server.api_url) as api:
        assert httpx.get(f"{api.url}/readyz").status_code == 503
        assert f"127.0.0.1:{server.port}" in httpx.get(f"{api.url}/readyz").json()["error"]["message"]
        with server:
            assert httpx.get(f"{api.url}/readyz").status_code == 200


async def test_event_stream_ends_when_redis_goes_away(server: RedisServer, api: ApiServer) -> None:
    async with Client(api.url, patience=20) as client, httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        await start(client)
        async with http.stream("GET", f"{AT}/events") as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("id: ")
            server.kill()
            async for line in lines:
                assert not line.startswith("data: ")
    assert "Traceback" not in api.log()


@over_both
async def test_long_poll_continues_across_a_redis_restart(server: RedisServer, api: ApiServer) -> None:
    async with Client(api.url, patience=20) as client:
        incarnation = await start(client)
        permit = (await client.permits(RUN, "env-1", 1, wait=0)).permits[0]
        leasing = asyncio.create_task(client.lease(RUN, incarnation, "b1", 1, wait=20))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.restart)
        await client.submit(make_group(permit.group_id, RUN), "env-1")
        batch = await asyncio.wait_for(leasing, 10)
        assert batch is not None
        assert [group.group_id for group in batch] == [permit.group_id]


@pytest.mark.parametrize("number", rest_is_long(signal.SIGTERM, signal.SIGHUP))
async def test_stop_does_not_wait_for_long_polls(server: RedisServer, api: ApiServer, number: signal.Signals) -> None:
    async with Client(api.url, patience=5) as client:
        waiting = asyncio.create_task(client.open_run(wait=50))
        await asyncio.sleep(0.5)
        assert await asyncio.to_thread(api.stop, number) < 30
        assert await waiting is None


@pytest.mark.long  # test_kill_loop.py kills every service in `make test`
@pytest.mark.parametrize("victim", ["both", "redis", "api"])
async def test_nothing_acknowledged_is_lost_by_kills(server: RedisServer, api: ApiServer, victim: str) -> None:
    """Two environments and a trainer work while the victim is killed three times."""
    acknowledged: set[str] = set()
    trained: set[str] = set()
    tormented, done = asyncio.Event(), asyncio.Event()

    async with Client(api.url, patience=60) as client:
        incarnation = await start(client)

        async def generate(holder: str) -> None:
            while not done.is_set():
                for permit in (await client.permits(RUN, holder, 3, wait=1)).permits:
                    await client.submit(make_group(permit.group_id, RUN, seed=permit.row, env_id=holder), holder)
                    acknowledged.add(permit.group_id)

        async def train() -> None:
            step = 0
            while not done.is_set():
                batch = await client.lease(RUN, incarnation, f"b{step}", 8, wait=1)
                if batch is None:
                    continue
                ids = {group.group_id for group in batch}
                assert not ids & trained, "trained twice"
                await client.ack(RUN, incarnation, [f"b{step}"])
                trained.update(ids)
                step += 1
                await client.record_version(RUN, PolicyVersion(incarnation, step))
                if tormented.is_set() and len(trained) >= 16:  # the work continued after the last kill
                    done.set()

        async def torment() -> None:
            for _ in range(3):
                await asyncio.sleep(0.7)
                if victim in ("redis", "both"):
                    server.kill()
                if victim in ("api", "both"):
                    api.kill()
                    await asyncio.to_thread(api.start)
                if victim in ("redis", "both"):
                    await asyncio.to_thread(server.start)
            tormented.set()

        async with asyncio.TaskGroup() as group:
            for work in (generate("env-1"), generate("env-2"), train(), torment()):
                group.create_task(work)

        audit = await client.audit(RUN)
        status = await client.status(RUN)
    everywhere = [*audit.trained, *audit.ready, *audit.leased, *audit.dead]
    assert len(everywhere) == len(set(everywhere)), "each group is in one place"
    assert acknowledged == set(everywhere)
    assert trained == set(audit.trained)
    assert not audit.dead
    assert status.accepted == len(everywhere)
    step = PolicyVersion.parse(status.version or "").step
    assert status.rows_issued <= (step + 1) * 8, "no kill made the API issue a further row"


@pytest.mark.parametrize(("options", "warned"), [(("--appendfsync", "everysec"), True), ((), False)])
def test_api_warns_about_weak_redis_durability(options: tuple[str, ...], warned: bool) -> None:
    with RedisServer(*options) as server, ApiServer(server.url) as api:
        warning = "CAN LOSE ACKNOWLEDGED GROUPS"
        while warned and warning not in api.log():
            time.sleep(0.05)
        assert httpx.get(f"{api.url}/readyz").status_code == 200
        assert (warning in api.log()) is warned


def test_redis_user_without_config_permission_gives_no_warning() -> None:
    with RedisServer("--appendfsync", "everysec") as server, ApiServer(server.api_url) as api:
        assert httpx.get(f"{api.url}/readyz").status_code == 200
        assert httpx.post(f"{api.url}/v1/runs", json={"run_id": RUN, "env": {}, "group_size": 2}).status_code == 201
        assert "CAN LOSE" not in api.log()
        assert PASSWORD not in api.log(), "no credentials in logs"


async def test_a_full_redis_refuses_submits_and_still_drains() -> None:
    with (
        RedisServer("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server,
        ApiServer(server.api_url) as api,
    ):
        async with Client(api.url, patience=5) as client, httpx.AsyncClient(base_url=api.url) as http:
            incarnation = await start(client)
            await client.record_version(RUN, PolicyVersion(incarnation, 30))
            stored = 0
            while True:
                permit = (await client.permits(RUN, "env-1", 1, wait=0)).permits[0]
                group = make_group(permit.group_id, RUN, lengths=((3, 3500),) * 2)
                answer = await http.put(
                    f"{AT}/groups/{permit.group_id}?holder=env-1",
                    content=group.encode(),
                    headers={"Content-Type": GROUP_MEDIA_TYPE},
                )
                if answer.status_code != 201:
                    break
                stored += 1
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "store_full")
            assert stored > 5
            assert await client.lease(RUN, incarnation, "b1", stored, wait=0) is not None
            await client.ack(RUN, incarnation, ["b1"])
            assert await client.submit(group, "env-1"), "acked groups made room"
