"""The API over HTTP: statuses, error shape, media types, framing, long-polls. A real uvicorn, a real Redis."""

from __future__ import annotations

import asyncio
import http.client
import re
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import RUN, trainer
from tests.support.api_server import ApiServer
from tests.support.errors import raises
from tests.support.groups import make_group

from gristmill import BATCH_MEDIA_TYPE, GROUP_MEDIA_TYPE, ApiError, Client, PolicyVersion, TrajectoryGroup
from gristmill_api.store import keys

AT = f"/v1/runs/{RUN}"
JSON = {"headers": {"Content-Type": "application/json"}}


async def start(client: Client, group_size: int = 2, **plan: Any) -> int:
    """Opens the run, takes it and records version 0."""
    await client.create_run(RUN, {"dataset": "d"}, group_size)
    incarnation, _ = await client.take(RUN, trainer(**plan), [])
    await client.record_version(RUN, PolicyVersion(incarnation, 0))
    return incarnation


async def put(http: httpx.AsyncClient, group_id: str, body: bytes, **headers: str) -> httpx.Response:
    return await http.put(
        f"{AT}/groups/{group_id}",
        params={"holder": "env-1"},
        content=body,
        headers={"Content-Type": GROUP_MEDIA_TYPE, **headers},
    )


def code(answer: httpx.Response) -> tuple[int, str]:
    """Checks status and code. Every error has all three texts."""
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "remedy"}
    assert all(isinstance(text, str) and text for text in error.values())
    return answer.status_code, error["code"]


@pytest.mark.parametrize(
    "block",
    [
        {"my_temperature": 0.7},
        {"learning_rate": "fast", "batch_size": 3},
        {"on_step": "/tmp/mine.py:f", "push_to_hub": "somebody/model"},
    ],
)
async def test_run_keeps_settings_of_any_trainer(http: httpx.AsyncClient, block: dict[str, Any]) -> None:
    """The trainer that takes the run checks them."""
    answer = await http.post("/v1/runs", json={"run_id": RUN, "env": {"trainer": block}, "group_size": 2})
    assert answer.status_code == 201
    assert (await http.get(AT)).json()["env"] == {"trainer": block}


@pytest.mark.parametrize("block", ["fast", ["fast"], 1])
async def test_create_run_refuses_settings_of_a_trainer_that_are_no_object(http: httpx.AsyncClient, block: Any) -> None:
    """Readers of runs show the settings by name."""
    answer = await http.post("/v1/runs", json={"run_id": RUN, "env": {"trainer": block}, "group_size": 2})
    assert code(answer) == (422, "bad_config")
    assert (await http.get(AT)).status_code == 404


async def test_sdk_client_completes_a_training_step(client: Client) -> None:
    assert await client.open_run(wait=0) is None
    incarnation = await start(client)
    opened = await client.open_run(wait=0)
    assert opened is not None
    assert opened.run_id == RUN
    grant = await client.permits(RUN, "env-1", 8, wait=0)
    groups = [make_group(permit.group_id, RUN, seed=permit.row) for permit in grant.permits]
    for group in groups:
        assert await client.submit(group, "env-1")
        assert not await client.submit(group, "env-1")
    batch = await client.lease(RUN, incarnation, "b1", 4, wait=0)
    assert batch is not None
    assert [group.encode() for group in batch] == [group.encode() for group in groups]
    assert await client.lease(RUN, incarnation, "b2", 1, wait=0) is None
    assert await client.extend(RUN, incarnation, ["b1", "b2"]) == ["b2"]
    assert (await client.status(RUN)).leased == 4
    await client.ack(RUN, incarnation, ["b1"])
    assert (await client.audit(RUN)).trained == [group.group_id for group in groups]
    with raises(ApiError, "lease_lost") as lost:
        await client.ack(RUN, incarnation, ["b1", "b2"])
    assert lost.value.status == 410
    assert "b2" in lost.value.message
    await client.record_version(RUN, PolicyVersion(incarnation, 1))
    a, b, c, _ = (await client.permits(RUN, "env-1", 8, wait=0)).permits
    await client.return_permit(RUN, "env-1", a.group_id, "same_scores")
    assert await client.renew_permits(RUN, "env-1", [a.group_id, b.group_id]) == [a.group_id]
    await client.abandon_permits(RUN, "env-1")
    (again,) = (await client.permits(RUN, "env-2", 1, wait=0)).permits
    assert (again.group_id, again.row) == (b.group_id, b.row)
    assert (await client.finish(RUN, incarnation)).state == "finished"
    assert (await client.permits(RUN, "env-1", 8, wait=5)).state == "finished"
    assert c.row == 6


async def test_a_batch_is_a_msgpack_array_of_the_bytes_as_submitted(client: Client, http: httpx.AsyncClient) -> None:
    incarnation = await start(client)
    permits = (await client.permits(RUN, "env-1", 2, wait=0)).permits
    sent = []
    for permit, length in zip(permits, (4, 400), strict=True):  # this header needs a bin16 header
        body = make_group(permit.group_id, RUN, lengths=((3, length), (3, 2))).encode()
        # The API keeps a key that it does not know: it neither decodes nor encodes the group.
        body = msgspec.msgpack.encode({**msgspec.msgpack.decode(body), "later": 1})
        assert (await put(http, permit.group_id, body)).status_code == 201
        assert (await put(http, permit.group_id, body)).status_code == 200
        sent.append(body)
    asked = {"incarnation": incarnation, "batch_id": "b1", "groups": 2}
    answer = await http.post(f"{AT}/lease", json=asked)
    assert answer.headers["content-type"] == BATCH_MEDIA_TYPE
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert msgspec.msgpack.decode(answer.content, type=list[bytes]) == sent
    assert (await http.post(f"{AT}/lease", json={**asked, "batch_id": "b2"})).status_code == 204


@pytest.mark.parametrize("group_size", [2, 4], ids=["whole group", "smaller group"])
async def test_group_with_branches_is_stored_as_received_and_counts_its_rollouts(
    client: Client, http: httpx.AsyncClient, group_size: int
) -> None:
    incarnation = await start(client, group_size)
    name = (await client.permits(RUN, "env-1", 1, wait=0)).permits[0].group_id
    body = make_group(name, RUN, lengths=((3, 4),) * 5, rewards=(1, 1, 0, 0, 0), rollouts=(0, 0, 1, 1, 1)).encode()
    assert (await put(http, name, body)).status_code == 201
    assert (await client.status(RUN)).sequences["ready"] == 2
    answer = await http.post(f"{AT}/lease", json={"incarnation": incarnation, "batch_id": "b1", "groups": 1})
    assert msgspec.msgpack.decode(answer.content, type=list[bytes]) == [body]


async def test_bad_groups_are_refused_with_the_reason_and_nothing_is_stored(
    client: Client, http: httpx.AsyncClient
) -> None:
    await start(client)
    name = (await client.permits(RUN, "env-1", 1, wait=0)).permits[0].group_id
    good = make_group(name, RUN)
    body = good.encode()
    wire = msgspec.msgpack.decode(body)
    bad = {
        "truncated": body[:-3],
        "empty": b"",
        "not a map": b"\x93\x01\x02\x03",
        "format": msgspec.msgpack.encode({**wire, "format": 2}),
        "short logprobs": msgspec.msgpack.encode({**wire, "logprobs": wire["logprobs"][:-4]}),
        "NaN": msgspec.msgpack.encode({**wire, "rewards": b"\x00\x00\xc0\x7f" * 2}),
        "negative tokens": msgspec.msgpack.encode({**wire, "tokens": b"\xff" * len(wire["tokens"])}),
        "other run": msgspec.msgpack.encode({**wire, "run_id": "other"}),
        "other group": msgspec.msgpack.encode({**wire, "group_id": "g00000009"}),
        "other row": msgspec.msgpack.encode({**wire, "row": 5}),
        "three sequences": make_group(name, RUN, lengths=((3, 4),) * 3).encode(),
        "three rollouts": make_group(
            name, RUN, lengths=((3, 4),) * 4, rewards=(1, 1, 0, 0), rollouts=(0, 0, 1, 2)
        ).encode(),
        "one rollout": make_group(name, RUN, rewards=(1, 1), rollouts=(0, 0)).encode(),
        "a gap in rollouts": msgspec.msgpack.encode({**wire, "rollouts": struct.pack("<2i", 0, 2)}),
        "one rollout with two rewards": msgspec.msgpack.encode({**wire, "rollouts": bytes(8)}),
    }
    for what, content in bad.items():
        assert code(await put(http, name, content)) == (400, "bad_group"), what
    assert code(await put(http, "never-issued", body)) == (400, "bad_group")
    assert code(await put(http, name, body, **{"Content-Type": "application/json"})) == (415, "media_type")
    assert code(await put(http, name, b"x" * 200_001)) == (413, "too_large")
    assert code(
        await http.post("/v1/runs", content=b'"' + b"x" * 200_001, headers={"Content-Type": "application/json"})
    ) == (
        413,
        "too_large",
    )

    async def endless() -> Any:
        for _ in range(1000):
            yield b"x" * 1000

    streamed = await http.put(
        f"{AT}/groups/{name}", params={"holder": "env-1"}, content=endless(), headers={"Content-Type": GROUP_MEDIA_TYPE}
    )
    assert code(streamed) == (413, "too_large"), "the size is counted, not believed"
    status = await client.status(RUN)
    assert (status.accepted, status.bytes, status.outstanding) == (0, 0, 1)
    assert await client.submit(good, "env-1")


async def test_submit_above_the_byte_cap_gets_429_with_retry_after(client: Client, http: httpx.AsyncClient) -> None:
    await start(client)
    answers = []
    for permit in (await client.permits(RUN, "env-1", 4, wait=0)).permits:
        group = make_group(permit.group_id, RUN, lengths=((3, 400), (3, 400)))  # about 7 KB of the 20 KB
        answers.append(await put(http, permit.group_id, group.encode()))
    assert [answer.status_code for answer in answers] == [201, 201, 429, 429]
    assert code(answers[2]) == (429, "store_full")
    assert answers[2].headers["retry-after"] == "2"


async def test_invalid_requests_get_422_in_our_error_shape(http: httpx.AsyncClient) -> None:
    run = {"run_id": RUN, "env": {}, "group_size": 2}
    for method, path, body in (
        ("POST", "/v1/runs", {**run, "run_id": "a/b"}),
        ("POST", "/v1/runs", {**run, "run_id": "x" * 65}),
        ("POST", "/v1/runs", {**run, "group_size": 0}),
        ("POST", "/v1/runs", {**run, "groupsize": 2}),
        ("POST", "/v1/runs", {**run, "env": []}),
        ("POST", f"{AT}/permits", {"holder": "e", "count": 0}),
        ("POST", f"{AT}/permits", {"holder": "e", "count": 1, "wait": -1}),
        ("POST", f"{AT}/permits/return", {"holder": "e", "group_id": "g1", "reason": "no spaces"}),
        ("POST", f"{AT}/envs", {"env_id": "."}),
        ("POST", f"{AT}/envs", {"env_id": "x" * 129}),
        ("POST", f"{AT}/metrics", {"source": "..", "step": 1, "values": {}}),
        ("GET", "/v1/open?wait=nan", None),
        ("PUT", f"{AT}/groups/g1", None),
    ):
        assert code(await http.request(method, path, json=body)) == (422, "bad_request"), (path, body)
    as_json = {"Content-Type": "application/json"}
    for text in (b"{", b"[]", b"\xff\xfe", b'{"run_id": "a", "env": {"x": NaN}, "group_size": 1}'):
        answer = await http.post("/v1/runs", content=text, headers=as_json)
        assert code(answer)[0] in (400, 422), text
    assert (await http.get("/v1/runs")).json() == []


async def test_unknown_routes_methods_and_runs_get_404_or_405(http: httpx.AsyncClient) -> None:
    assert code(await http.get("/v1/nothing")) == (404, "no_route")
    answer = await http.delete("/v1/runs")
    assert code(answer) == (405, "no_method")
    assert answer.headers["allow"] == "GET, POST", "all that the path takes, whichever route has it"
    verbs = {
        "take": {"trainer": trainer()},
        "version": {"incarnation": 1, "step": 0},
        "finish": {"incarnation": 1},
        "permits": {"holder": "e", "count": 1},
        "permits/renew": {"holder": "e"},
        "permits/return": {"holder": "e", "group_id": "g00000000", "reason": "abandoned"},
        "permits/abandon": {"holder": "e"},
        "lease": {"incarnation": 1, "batch_id": "b", "groups": 1},
        "extend": {"incarnation": 1, "batch_ids": ["b"]},
        "ack": {"incarnation": 1, "batch_ids": ["b"]},
    }
    for verb, body in verbs.items():
        assert code(await http.post(f"{AT}/{verb}", json=body)) == (404, "run_missing"), verb
    for path in ("", "/status", "/groups"):
        assert code(await http.get(AT + path)) == (404, "run_missing"), path
    assert code(await put(http, "g00000000", make_group("g00000000", RUN).encode())) == (404, "run_missing")


async def test_run_conflicts_are_refused_with_their_code_over_http(client: Client, http: httpx.AsyncClient) -> None:
    run = {"run_id": RUN, "env": {"dataset": "d"}, "group_size": 2}
    assert (await http.post("/v1/runs", json=run)).status_code == 201
    assert (await http.post("/v1/runs", json=run)).status_code == 200
    await client.register_env(RUN, "env-1")
    for other, refused in (({"group_size": 4}, "config_differs"), ({"run_id": "other"}, "run_open")):
        answer = await http.post("/v1/runs", json={**run, **other})
        assert code(answer) == (409, refused)
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
    assert code(await http.post(f"{AT}/take", json={"trainer": trainer() | {"batch_size": 3}})) == (422, "bad_config")
    for creation, answered in (("0" * 32, (409, "other_creation")), ("other", (422, "bad_request"))):
        assert code(await http.post(f"{AT}/take", json={"trainer": trainer(), "creation": creation})) == answered
    known = (await client.get_run(RUN)).creation
    _, taken = await client.take(RUN, trainer(), ["g00000000"], 1, known)
    assert taken.creation == known


@pytest.fixture
async def notified(redis_url: str) -> AsyncIterator[Client]:
    """A client of an API whose waiting requests find a change by a notification only."""
    with ApiServer(redis_url, RECHECK_S="3600") as server:
        async with Client(server.url, patience=10) as client:
            yield client


async def test_long_polls_wake_by_notifications(notified: Client) -> None:
    client = notified
    async with asyncio.timeout(50):  # Each request waits for longer.
        opening = asyncio.create_task(client.open_run(wait=60))
        await asyncio.sleep(0.2)
        await client.create_run(RUN, {"dataset": "d"}, 2)
        record = await opening
        assert record is not None
        assert record.run_id == RUN

        incarnation, _ = await client.take(RUN, trainer(), [])
        permits = asyncio.create_task(client.permits(RUN, "env-1", 1, wait=60))
        leasing = asyncio.create_task(client.lease(RUN, incarnation, "b1", 1, wait=60))
        await asyncio.sleep(0.2)
        await client.record_version(RUN, PolicyVersion(incarnation, 0))
        [permit] = (await permits).permits
        await client.submit(make_group(permit.group_id, RUN), "env-1")
        assert [type(group) for group in await leasing or []] == [TrajectoryGroup]

        full = await client.permits(RUN, "env-2", 9, wait=0)
        assert len(full.permits) == 3
        before = time.monotonic()
        assert (await client.permits(RUN, "env-2", 1, wait=0.4)).permits == []
        assert time.monotonic() - before > 0.3
        waiting = asyncio.create_task(client.permits(RUN, "env-2", 1, wait=60))
        await asyncio.sleep(0.2)
        await client.return_permit(RUN, "env-2", full.permits[0].group_id, "too_long")
        assert len((await waiting).permits) == 1


@pytest.mark.parametrize(
    ("method", "path", "sent", "told"),
    [
        ("PUT", f"{AT}/groups/g00000000", {}, "query.holder"),
        ("PUT", f"{AT}/groups/g00000000?holder=a%20b", {}, "query.holder"),
        ("PUT", f"{AT}/groups/a%20b?holder=env-1", {}, "path.group_id"),
        ("POST", "/v1/runs/a%20b/lease", {"json": {"incarnation": 1, "batch_id": "b", "groups": 1}}, "path.run_id"),
        ("POST", f"{AT}/lease", {"json": {"incarnation": 0, "batch_id": "b", "groups": 1}}, "body.incarnation"),
        ("POST", f"{AT}/lease", {"json": {"incarnation": 1, "batch_id": "b", "group": 1}}, "body.group"),
        ("POST", f"{AT}/lease", {"content": b'{"incarnation": 1', **JSON}, "body"),
        ("POST", f"{AT}/lease", {"content": b"{}", "headers": {"Content-Type": "text/plain"}}, "header.content-type"),
        ("POST", f"{AT}/lease", {}, "header.content-type"),
    ],
)
async def test_fast_routes_validate_their_parameters(
    http: httpx.AsyncClient, method: str, path: str, sent: dict[str, Any], told: str
) -> None:
    """These routes read their parameters without FastAPI: http/fast_route.py."""
    answer = await http.request(method, path, **sent)
    assert code(answer) == (422, "bad_request")
    assert answer.json()["error"]["message"].startswith(f"{told}: ")


async def test_a_batch_that_cannot_be_sent_whole_is_refused_or_breaks_the_connection(
    redis_url: str, redis: Redis
) -> None:
    """A client must not take a short answer for a batch. The retry gets the whole batch."""
    with ApiServer(redis_url) as server:
        async with Client(server.url, patience=10) as client, httpx.AsyncClient(base_url=server.url) as http:
            incarnation = await start(client)
            names = [permit.group_id for permit in (await client.permits(RUN, "env-1", 2, wait=0)).permits]
            for name in names:  # over 2 MiB each: read and sent in a separate part
                await client.submit(make_group(name, RUN, lengths=((3, 150_000),) * 2), "env-1")
            asked = {"incarnation": incarnation, "batch_id": "b1", "groups": 2}
            first, second = (keys.payload(RUN, name) for name in names)

            await redis.rename(first, "gm:hidden")
            assert code(await http.post(f"{AT}/lease", json=asked)) == (410, "lease_lost")
            await redis.rename("gm:hidden", first)

            await redis.rename(second, "gm:hidden")
            with pytest.raises(httpx.RemoteProtocolError):
                await http.post(f"{AT}/lease", json=asked)
            await redis.rename("gm:hidden", second)

            batch = await client.lease(RUN, incarnation, "b1", 2, wait=0)
            assert batch is not None
            assert [group.group_id for group in batch] == names


async def test_a_change_through_one_api_wakes_a_wait_at_another(client: Client, notified: Client) -> None:
    async with asyncio.timeout(50):
        waiting = asyncio.create_task(notified.open_run(wait=60))
        await asyncio.sleep(0.3)
        await client.create_run(RUN, {"dataset": "d"}, 2)
        assert await waiting is not None


async def test_disconnected_client_gets_no_lease(client: Client, http: httpx.AsyncClient) -> None:
    async def ended() -> float:
        """Returns how many lease requests the API has ended."""
        pattern = r'requests_total\{method="POST",route="/v1/runs/\{run_id\}/lease",status="204"\} (\S+)'
        counts = re.findall(pattern, (await http.get("/metrics")).text)
        return float(counts[0]) if counts else 0.0

    incarnation = await start(client)
    before = await ended()
    body = {"incarnation": incarnation, "batch_id": "b1", "groups": 1, "wait": 600}
    with pytest.raises(httpx.ReadTimeout):
        await http.post(f"{AT}/lease", json=body, timeout=0.3)
    while await ended() == before:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    permit = (await client.permits(RUN, "env-1", 1, wait=0)).permits[0]
    await client.submit(make_group(permit.group_id, RUN), "env-1")
    batch = await client.lease(RUN, incarnation, "b2", 1, wait=20)
    assert batch is not None, "the group is in b1"
    assert [group.group_id for group in batch] == [permit.group_id]


async def test_logs_and_metrics_report_each_change(
    client: Client, http: httpx.AsyncClient, shared_api: ApiServer
) -> None:
    incarnation = await start(client)
    a, b, c = (permit.group_id for permit in (await client.permits(RUN, "env-1", 3, wait=0)).permits)
    group = make_group(a, RUN)
    await client.submit(group, "env-1")
    await client.submit(make_group(b, RUN), "env-1")
    await client.return_permit(RUN, "env-1", c, "too_long")
    await client.lease(RUN, incarnation, "b1", 1, wait=0)
    text = (await http.get("/metrics")).text
    for sample in (
        'gristmill_api_groups{run="run-1",state="ready"} 1.0',
        'gristmill_api_groups{run="run-1",state="leased"} 1.0',
        'gristmill_api_groups{run="run-1",state="trained"} 0.0',
        'gristmill_api_groups{run="run-1",state="dead"} 0.0',
        "gristmill_api_redis_up 1.0",
        'gristmill_api_requests_total{method="PUT",route="/v1/runs/{run_id}/groups/{group_id}",status="201"}',
        'gristmill_api_request_seconds_count{method="POST",route="/v1/runs/{run_id}/lease"}',
        'gristmill_api_submits_total{outcome="stored"}',
    ):
        assert sample in text
    await client.ack(RUN, incarnation, ["b1"])
    await client.finish(RUN, incarnation)
    assert "gristmill_api_groups{" not in (await http.get("/metrics")).text, "no run is open"
    log = shared_api.log()
    for told in (
        f"take run={RUN} incarnation={incarnation} covered=0",
        f"version run={RUN} version={incarnation}.0",
        f"submit run={RUN} group={a} env=env-1 sequences=2 bytes={len(group.encode())}",
        f"drop run={RUN} group={c} reason=too_long holder=env-1",
        f"lease run={RUN} batch=b1 incarnation={incarnation} groups=1",
        f"ack run={RUN} incarnation={incarnation} batches=1 already=0 groups=1 lost=0",
        f"run run={RUN} state=finished",
    ):
        assert told in log


async def test_closed_run_frees_the_stack_for_another_run(client: Client) -> None:
    await client.create_run("first", {"dataset": "d"}, 2)
    await client.register_env("first", "env-1")
    with raises(ApiError, "run_open") as refused:
        await client.create_run("second", {"dataset": "d"}, 2)
    assert "POST <API>/v1/runs/first/close" in refused.value.remedy
    assert (await client.close_run("first")).state == "finished"
    assert (await client.permits("first", "env-1", 1, 0)).state == "finished"
    second = await client.create_run("second", {"dataset": "d"}, 2)
    assert second.state == "open"
    assert (await client.permits("second", "env-1", 1, 0)).creation == second.creation


async def test_openapi_is_served(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert set(paths) >= {
        "/healthz", "/readyz", "/metrics", "/v1/open", "/v1/runs", "/v1/runs/{run_id}",
        *(f"/v1/runs/{{run_id}}/{verb}" for verb in (
            "take", "version", "finish", "close", "status", "permits", "permits/renew", "permits/return",
            "permits/abandon", "groups", "groups/{group_id}", "lease", "extend", "ack", "nack", "envs",
            "envs/{env_id}", "envs/{env_id}/heartbeat", "claims", "dead", "dead/replay", "dead/purge", "metrics",
            "metrics/{source}", "events", "examples",
        )),
    }  # fmt: skip


def test_idle_connection_stays_open_for_longer_than_clients_use_it(shared_api: ApiServer) -> None:
    """uvicorn closes an idle connection after 5 seconds by default, at a time when httpx clients may send the next
    request."""
    connection = http.client.HTTPConnection("127.0.0.1", shared_api.port, timeout=30)
    connection.auto_open = 0  # The client does not connect again.
    connection.connect()
    for pause in (0, 6):
        time.sleep(pause)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b'{"status":"ok"}'
    connection.close()
