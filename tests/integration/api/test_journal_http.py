"""Over HTTP: environments, dead letters, metrics, the event stream, examples, deletion; the SDK's calls for them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import RUN, trainer
from tests.integration.api.test_http import AT, code, start
from tests.support.errors import raises
from tests.support.groups import make_group

from gristmill import ApiError, Client, SyncClient
from gristmill_api.store import keys


async def submit(client: Client, count: int) -> list[str]:
    grant = await client.permits(RUN, "env-1", count, wait=0)
    for permit in grant.permits:
        await client.submit(make_group(permit.group_id, RUN, seed=permit.row), "env-1")
    return [permit.group_id for permit in grant.permits]


async def test_a_read_ignores_a_creation(client: Client, http: httpx.AsyncClient) -> None:
    """Only requests that change something name the creation of their run."""
    await start(client)
    await http.post(f"{AT}/metrics", json={"source": "a.b_c-1", "step": 1, "values": {"loss": 0.5, "text": "\u00e9"}})
    for path in ("", "/status", "/metrics", "/metrics/a.b_c-1", "/groups", "/envs", "/examples"):
        plain = await http.get(AT + path)
        named = await http.get(AT + path, params={"creation": "ab"})
        assert plain.status_code == named.status_code == 200, path
        assert plain.json() == named.json() or path == "/status", path
    (row,) = (await http.get(f"{AT}/metrics/a.b_c-1")).json()
    assert row == {"source": "a.b_c-1", "step": 1, "values": {"loss": 0.5, "text": "\u00e9"}}


async def read_events(
    http: httpx.AsyncClient, count: int, ready: asyncio.Event | None = None, after: str | None = None
) -> list[dict[str, Any]]:
    """Returns the first `count` events of the stream, after checking id and event name against the data."""
    found: list[dict[str, Any]] = []
    event: dict[str, str] = {}
    headers = {} if after is None else {"Last-Event-ID": after}
    async with http.stream("GET", f"{AT}/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        if ready is not None:
            ready.set()
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if line:
                event[name] = value
            elif "data" in event:
                data = json.loads(event["data"])
                assert (event["id"], event["event"]) == (data["id"], data["kind"])
                found.append(data)
                event = {}
            if len(found) == count:
                return found
    raise AssertionError(f"the stream ended after {len(found)} events")


async def test_environments_are_registered_and_listed_over_http(client: Client, http: httpx.AsyncClient) -> None:
    await start(client)
    await client.register_env(RUN, "env-1", weight=2.0)
    (listed,) = (await http.get(f"{AT}/envs")).json()
    assert 0 <= listed.pop("last_seen_s") < 30
    assert listed == {
        "env_id": "env-1", "weight": 2.0, "min_batch_allocation": None, "heartbeat_s": None, "alive": True,
    }  # fmt: skip
    await client.register_env(RUN, "env-1", heartbeat_s=3)
    (env,) = await client.environments(RUN)
    assert (env.env_id, env.heartbeat_s, env.alive) == ("env-1", 3, True)
    assert (await http.post(f"{AT}/envs/env-1/heartbeat")).status_code == 204
    assert (await http.delete(f"{AT}/envs/env-1")).status_code == 204
    assert code(await http.post(f"{AT}/envs/env-1/heartbeat")) == (404, "env_missing")
    assert code(await http.delete(f"{AT}/envs/env-1")) == (404, "env_missing")
    for wrong in ({"weight": 0}, {"weight": -1}, {"min_batch_allocation": 0.5}, {"heartbeat_s": 0}, {"wieght": 1}):
        assert code(await http.post(f"{AT}/envs", json={"env_id": "e", **wrong})) == (422, "bad_request")
    assert (await http.get(f"{AT}/envs")).json() == []
    assert code(await http.get("/v1/runs/nowhere/envs")) == (404, "run_missing")


async def test_dead_letters_are_listed_and_purged_over_http(
    client: Client, http: httpx.AsyncClient, redis_url: str
) -> None:
    incarnation = await start(client)
    first, _ = await submit(client, 2)
    async with Redis.from_url(redis_url) as redis:
        await redis.hset(f"{keys.prefix(RUN)}group:{first}", "attempts", 100)
    assert await client.lease(RUN, incarnation, "b1", 2, wait=0) is None
    (letter,) = await client.dead_letters(RUN)
    assert (letter.group_id, letter.reason) == (first, "undeliverable")
    assert await client.dead_letters(RUN, offset=1) == []
    assert (await client.read_group(RUN, first)).encode() == make_group(first, RUN, seed=0).encode()
    assert await client.replay_dead_letters(RUN, [first]) == 1
    assert (await client.audit(RUN)).dead == []
    assert (await http.post(f"{AT}/dead/purge", json={})).json() == {"groups": 0}
    with raises(ApiError, "group_missing"):
        await client.read_group(RUN, "g00000099")
    assert code(await http.get("/v1/runs/nowhere/dead")) == (404, "run_missing")


async def test_metrics_are_kept_by_source_and_step(client: Client, http: httpx.AsyncClient) -> None:
    await start(client)
    for step in (1, 2, 3):
        await client.report_metrics(RUN, "trainer", step, {"loss": step / 2, "seconds": {"train": 1.5}})
    await client.report_metrics(RUN, "trainer", 2, {"loss": 9.0})
    await client.report_metrics(RUN, "env-1", 1, {"reward": 0.5, "loss": float("nan"), "max": float("-inf")})
    assert await client.metric_sources(RUN) == ["env-1", "trainer"]
    rows = (await http.get(f"{AT}/metrics/trainer", params={"after_step": 1})).json()
    assert rows == [
        {"source": "trainer", "step": 2, "values": {"loss": 9.0}},
        {"source": "trainer", "step": 3, "values": {"loss": 1.5, "seconds": {"train": 1.5}}},
    ]
    assert [row.step for row in await client.metrics(RUN, "trainer", limit=1)] == [1]
    (row,) = (await http.get(f"{AT}/metrics/env-1")).json()
    assert row["values"] == {"reward": 0.5, "loss": "nan", "max": "-inf"}
    assert (await http.get(f"{AT}/metrics/env-1", params={"after_step": 9})).json() == []
    assert (await http.get(f"{AT}/metrics/eval")).json() == [], "the environment asks before the first evaluation"
    missing = await http.get(f"{AT}/metrics/trianer")
    assert code(missing) == (404, "source_missing")
    assert "env-1, trainer" in missing.json()["error"]["remedy"]
    many = {str(number): number for number in range(200)}
    for wrong in (
        {"step": -1},
        {"values": {"loss": "x" * 300}},
        {"values": {"loss": True}},
        {"values": {"": 1}},
        {"values": {"a": many, "b": many}},
        {"values": {**many, "a": many}},
    ):
        row = {"source": "trainer", "step": 1, "values": {}, **wrong}
        assert code(await http.post(f"{AT}/metrics", json=row)) == (422, "bad_request")
    nan = await http.post(f"{AT}/metrics", content='{"source": "t", "step": 1, "values": {"loss": NaN}}')
    assert code(nan) == (422, "bad_request")


async def test_event_stream_reports_changes_and_continues_after_the_last_event_id(
    client: Client, http: httpx.AsyncClient
) -> None:
    incarnation = await start(client)
    ready = asyncio.Event()
    listening = asyncio.create_task(read_events(http, 4, ready))
    await asyncio.wait_for(ready.wait(), 10)
    (group,) = await submit(client, 1)
    await client.lease(RUN, incarnation, "b1", 1, wait=0)
    await client.ack(RUN, incarnation, ["b1"])
    await client.close_run(RUN)
    heard = await asyncio.wait_for(listening, 10)
    assert [event["kind"] for event in heard] == ["submit", "lease", "ack", "finish"]
    assert heard[0]["fields"] == {"group": group, "env": "env-1", "sequences": "2", "tokens": "12"}
    again = await asyncio.wait_for(read_events(http, 2, after=heard[1]["id"]), 10)
    assert again == heard[2:]
    told = await asyncio.wait_for(read_events(http, 3, after="0-0"), 10)
    assert [event["kind"] for event in told] == ["open", "take", "version"]
    for wrong in ("soon", f"{2**64}-0", f"0-{2**64}", f"{2**64 - 1}-{2**64 - 1}"):
        assert code(await http.get(f"{AT}/events", headers={"Last-Event-ID": wrong})) == (422, "bad_request"), wrong
    assert code(await http.get("/v1/runs/nowhere/events")) == (404, "run_missing")


async def test_event_stream_begins_with_the_id_of_the_newest_event(client: Client, http: httpx.AsyncClient) -> None:
    await start(client)
    newest = (await read_events(http, 3, after="0-0"))[-1]["id"]
    async with http.stream("GET", f"{AT}/events") as answer:
        assert await anext(answer.aiter_lines()) == f"id: {newest}"


async def test_both_clients_follow_the_events_of_a_run(client: Client) -> None:
    await start(client)
    with SyncClient(client.url, patience=10) as other:
        blocking = other.events(RUN, after="0-0")
        events = [next(blocking) for _ in range(3)]
        blocking.close()
    assert [event.kind for event in events] == ["open", "take", "version"]
    following = client.events(RUN, after=events[0].id)
    assert [(await anext(following)).id for _ in range(2)] == [events[1].id, events[2].id]
    await following.aclose()


async def test_event_stream_ends_when_its_run_is_deleted(client: Client, http: httpx.AsyncClient) -> None:
    await start(client)
    await client.close_run(RUN)
    ready = asyncio.Event()
    listening = asyncio.create_task(read_events(http, 1, ready))
    await asyncio.wait_for(ready.wait(), 10)
    await client.delete_run(RUN)
    with pytest.raises(AssertionError, match="ended after 0 events"):
        await asyncio.wait_for(listening, 10)
    with raises(ApiError, "run_missing"):
        await client.get_run(RUN)


async def test_examples_show_the_groups_submitted_last(client: Client, http: httpx.AsyncClient) -> None:
    incarnation = await start(client)
    ids = await submit(client, 3)
    await client.lease(RUN, incarnation, "b1", 3, wait=0)
    await client.ack(RUN, incarnation, ["b1"])
    shown = (await http.get(f"{AT}/examples", params={"limit": 2})).json()
    assert [example["group_id"] for example in shown] == [ids[2], ids[1]]
    group = make_group(ids[2], RUN, seed=2)
    assert shown[0]["tokens"] == [group.tokens[:7].tolist(), group.tokens[7:].tolist()]
    assert shown[0]["trained"][0] == [False] * 3 + [True] * 4
    assert shown[0]["rewards"] == group.rewards.tolist()


async def test_lease_without_groups_is_refused(client: Client, http: httpx.AsyncClient) -> None:
    incarnation = await start(client, staleness=3)
    await submit(client, 4)
    for count in (3, 4):  # 3 of groups of 2: it would wait for ever
        asked: dict[str, object] = {"incarnation": incarnation, "batch_id": "b1", "sequences": count}
        assert code(await http.post(f"{AT}/lease", json=asked)) == (409, "lease_by_sequences")
    most = 16  # 4 a step, and up to 3 steps ahead
    answer = await http.post(f"{AT}/lease", json={"incarnation": incarnation, "batch_id": "b3", "groups": most})
    assert (answer.status_code, answer.headers["Gristmill-Dead"]) == (204, "0")
    never: dict[str, object] = {"incarnation": incarnation, "batch_id": "b3", "groups": most + 1}
    assert code(await http.post(f"{AT}/lease", json=never)) == (409, "lease_too_large")
    for wrong in ({}, {"groups": 1, "sequences": 1}, {"sequences": 0}, {"tokens": 1}):
        body = {"incarnation": incarnation, "batch_id": "b4", **wrong}
        assert code(await http.post(f"{AT}/lease", json=body)) == (422, "bad_request")


async def test_each_stack_has_its_own_open_run_over_http(client: Client, http: httpx.AsyncClient) -> None:
    await client.create_run("a", {}, 2, stack="one")
    await client.create_run("b", {}, 2, stack="two")
    for stack, run in (("one", "a"), ("two", "b")):
        found = await client.open_run(0, stack)
        assert found is not None
        assert (found.run_id, found.stack) == (run, stack)
    assert await client.open_run(0) is None
    await client.register_env("b", "env-1")
    answer = await http.post("/v1/runs", json={"run_id": "c", "env": {}, "group_size": 2, "stack": "two"})
    assert code(answer) == (409, "run_open")
    assert all(name in answer.json()["error"]["message"] for name in ("'b'", "'env-1'"))
    await client.take("b", trainer(), [])
    await client.close_run("b")
    await client.delete_run("b")
    assert [run.run_id for run in await client.list_runs()] == ["a"]
    assert await client.list_runs(offset=1) == []
