"""Reading groups back: /examples and /groups/{id}, for groups of both protocols."""

from __future__ import annotations

import json
from typing import Any

import httpx
from tests.integration.api.store_harness import RUN
from tests.integration.api.test_http import AT, put, start
from tests.support.api_server import ApiServer
from tests.support.groups import make_group
from tests.unit.api.atropos.groups import full

from gristmill import GROUP_MEDIA_TYPE, Client, TrajectoryGroup
from gristmill_api.atropos.conversion import to_json

ATROPOS = "/v1/runs/default"


async def submit(client: Client, http: httpx.AsyncClient, group: TrajectoryGroup, **headers: str) -> None:
    answer = await put(http, group.group_id, group.encode(), **headers)
    assert answer.status_code == 201, answer.text


async def post(http: httpx.AsyncClient, group: dict[str, Any]) -> None:
    answer = await http.post("/scored_data", json=group)
    assert (answer.status_code, answer.json()) == (200, {"status": "received"})


async def test_group_of_v1_is_read_as_bytes_and_as_an_example(client: Client, http: httpx.AsyncClient) -> None:
    await start(client)
    (permit,) = (await client.permits(RUN, "env-1", 1, wait=0)).permits
    group = make_group(permit.group_id, RUN)
    await submit(client, http, group)
    answer = await http.get(f"{AT}/groups/{permit.group_id}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, GROUP_MEDIA_TYPE)
    assert answer.content == group.encode()
    example = await http.get(f"{AT}/groups/{permit.group_id}", headers={"Accept": "application/json"})
    assert (example.status_code, example.headers["content-type"]) == (200, "application/json")
    assert example.json()["tokens"] == [group.tokens[:7].tolist(), group.tokens[7:].tolist()]
    assert (await http.get(f"{AT}/examples")).json() == [example.json()]
    assert await client.examples(RUN) == [await client.read_example(RUN, permit.group_id)]


async def test_messages_that_no_reader_could_show_are_refused_and_hide_no_example(
    client: Client, http: httpx.AsyncClient
) -> None:
    await start(client)
    (permit,) = (await client.permits(RUN, "env-1", 1, wait=0)).permits
    group = make_group(permit.group_id, RUN)
    deep: Any = "end"
    for _ in range(300):
        deep = [deep]
    message = {"role": "user", "content": deep}
    for messages in ([[message], []], [5, 6], [[{"role": "user"}]]):
        bad = TrajectoryGroup(**{**vars(group), "messages": messages})
        answer = await put(http, permit.group_id, bad.encode())
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_group")
    await submit(client, http, group)
    assert len((await http.get(f"{AT}/examples")).json()) == 1
    await post(http, {**full(), "messages": [[message], []]})
    (example,) = (await http.get(f"{ATROPOS}/examples")).json()
    assert example["messages"] is None


async def test_group_of_atropos_is_read_as_bytes_and_as_an_example(http: httpx.AsyncClient) -> None:
    for number in range(3):
        await post(http, {**full(), "scores": [float(number), 0.0]})
    answer = await http.get(f"{ATROPOS}/groups/a00000002")
    assert (answer.status_code, answer.headers["content-type"]) == (200, GROUP_MEDIA_TYPE)
    assert json.loads(to_json(answer.content)) == {**full(), "scores": [2.0, 0.0]}
    example = await http.get(f"{ATROPOS}/groups/a00000002", headers={"Accept": "application/json"})
    assert example.headers["content-type"] == "application/json"
    listed = await http.get(f"{ATROPOS}/examples", params={"limit": 2})
    assert listed.status_code == 200
    newest, before = listed.json()
    assert newest == example.json()
    assert (newest["group_id"], newest["tokens"], newest["rewards"]) == ("a00000002", full()["tokens"], [2.0, 0.0])
    assert newest["trained"] == [[False, True, True], [False, False, True, True]]
    assert (newest["env_id"], newest["messages"], newest["cut"]) == ("atropos-3", full()["messages"], False)
    assert before["rewards"] == [1.0, 0.0]


async def test_example_of_a_delivered_group_of_atropos_is_kept(http: httpx.AsyncClient) -> None:
    registration = {"wandb_group": "", "wandb_project": "", "checkpoint_dir": "", "batch_size": 2}
    numbers = {"max_token_len": 64, "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1}
    (await http.post("/register", json={**registration, **numbers})).raise_for_status()
    await post(http, full())
    assert len((await http.get("/batch")).json()["batch"]) == 1
    (example,) = (await http.get(f"{ATROPOS}/examples")).json()
    assert example["group_id"] == "a00000000"


async def test_long_group_is_cut(redis_url: str) -> None:
    row = list(range(20_000))
    with ApiServer(redis_url) as api:
        async with httpx.AsyncClient(base_url=api.url, timeout=30) as http:
            await post(http, {"tokens": [row], "masks": [row], "scores": [1.0]})
            (example,) = (await http.get(f"{ATROPOS}/examples")).json()
            view = await http.get(f"{ATROPOS}/groups/a00000000", headers={"Accept": "application/json"})
            assert view.json() == example
            assert (example["cut"], example["lengths"]) == (True, [20_000])
            assert example["tokens"] == [row[: len(example["tokens"][0])]]
            assert len(example["tokens"][0]) < 20_000
            whole = await http.get(f"{ATROPOS}/groups/a00000000")
            assert TrajectoryGroup.decode(whole.content).tokens.tolist() == row
