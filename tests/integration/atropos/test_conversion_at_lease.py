"""A trainer of Gristmill on the run that Atropos' environments feed: groups are binary from their submit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from tests.integration.api.store_harness import trainer as settings
from tests.integration.atropos.conversation import expand
from tests.support.api_server import ApiServer
from tests.support.groups import make_group
from tests.support.redis_server import RedisServer

from gristmill import GROUP_MEDIA_TYPE, Client, PolicyVersion, TrajectoryGroup, read_archive, read_rollouts
from gristmill.hyperparameters import Hyperparameters
from gristmill_api.atropos.conversion import to_json
from gristmill_api.http import framing

RUN = "default"
REGISTRATION: dict[str, str | int] = {
    **dict.fromkeys(("wandb_group", "wandb_project", "checkpoint_dir"), ""),
    **dict.fromkeys(("max_token_len", "save_checkpoint_interval", "starting_step", "num_steps"), 9),
    "batch_size": 4,
}


@pytest.fixture(scope="module")
def api(shared_redis: RedisServer) -> Iterator[ApiServer]:
    with ApiServer(shared_redis.api_url) as server:
        yield server


@pytest.fixture
async def http(redis_url: str, api: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api.url, timeout=30) as client:
        yield client


@pytest.fixture
async def client(redis_url: str, api: ApiServer) -> AsyncIterator[Client]:
    async with Client(api.url, patience=10) as client:
        yield client


async def post(http: httpx.AsyncClient, *groups: dict[str, object]) -> None:
    for group in groups:
        (await http.post("/scored_data", json=expand(group))).raise_for_status()


async def test_trainer_leases_binary_groups_that_were_posted_as_json(http: httpx.AsyncClient, client: Client) -> None:
    await post(http, {"group": 2, "is": 1})
    incarnation, _ = await client.take(RUN, settings(), [])
    await client.record_version(RUN, PolicyVersion(incarnation, 3))
    await post(http, {"group": 3, "is": 2, "env": 0})
    batch = await client.lease(RUN, incarnation, "b1", 2, wait=0)
    assert batch is not None
    assert [group.group_id for group in batch] == ["a00000000", "a00000001"]
    assert [group.lengths.tolist() for group in batch] == [[2, 2], [2, 2, 2]]
    assert [group.tokens.tolist()[:2] for group in batch] == [[1, 0], [2, 0]]
    assert [group.mask.tolist()[:2] for group in batch] == [[False, True]] * 2
    assert [str(group.oldest_version) for group in batch] == ["0.0", f"{incarnation}.3"]
    again = await client.lease(RUN, incarnation, "b1", 2, wait=0)
    assert again is not None
    assert [group.encode() for group in again] == [group.encode() for group in batch]
    before = await client.status(RUN)
    assert (before.sequences["leased"], before.bytes) == (5, before.bytes_by_state["leased"])
    await client.ack(RUN, incarnation, ["b1"])
    after = await client.status(RUN)
    assert (after.trained, after.sequences["leased"], after.bytes) == (2, 0, 0)


async def test_group_is_stored_in_the_form_that_is_leased(http: httpx.AsyncClient, client: Client) -> None:
    await post(http, {"group": 2, "is": 1})
    stored, size = await http.get(f"/v1/runs/{RUN}/groups/a00000000"), (await client.status(RUN)).bytes
    assert stored.headers["content-type"] == GROUP_MEDIA_TYPE
    incarnation, _ = await client.take(RUN, settings(), [])
    batch = await client.lease(RUN, incarnation, "b1", 1, wait=0)
    assert batch is not None
    assert batch[0].encode() == TrajectoryGroup.decode(stored.content).encode()
    assert (batch[0].group_id, batch[0].row, batch[0].run_id) == ("a00000000", 0, RUN)
    status = await client.status(RUN)
    assert (status.bytes, status.bytes_by_state["leased"], size) == (len(stored.content),) * 3


async def test_batch_of_several_parts_is_answered_completely(http: httpx.AsyncClient, client: Client) -> None:
    length = 300_000
    groups: list[dict[str, object]] = [{"group": 2, "is": number, "long": length} for number in range(4)]
    await post(http, *groups, {"group": 2, "is": 4})
    incarnation, _ = await client.take(RUN, settings(groups=5), [])
    batch = await client.lease(RUN, incarnation, "b1", 5, wait=0)
    assert batch is not None
    assert min(len(group.encode()) for group in batch[:4]) > framing.PART_BYTES
    assert [group.group_id for group in batch] == [f"a{row:08}" for row in range(5)]
    assert [group.lengths.tolist() for group in batch] == [[length + 1] * 2] * 4 + [[2, 2]]
    for number, group in enumerate(batch[:4]):
        assert group.tokens.tolist() == [token for index in range(2) for token in (*[number] * length, index)]


async def test_group_without_a_binary_form_becomes_a_dead_letter_and_is_replaced(
    http: httpx.AsyncClient, client: Client
) -> None:
    bad = {"tokens": [[1]], "masks": [[1]], "scores": [1.0], "inference_logprobs": [[1.0]]}
    for body in (expand({"group": 1, "is": 1}), bad, expand({"group": 1, "is": 2}), bad, expand({"group": 1, "is": 3})):
        (await http.post("/scored_data", json=body)).raise_for_status()
    incarnation, _ = await client.take(RUN, settings(), [])
    batch = await client.lease(RUN, incarnation, "b1", 3, wait=0)
    assert batch is not None
    assert [int(group.tokens[0]) for group in batch] == [1, 2, 3]
    letters = (await http.get(f"/v1/runs/{RUN}/dead")).json()
    assert "log-probabilities" in str(letters)
    status = await client.status(RUN)
    assert (status.ready, status.leased, status.dead) == (0, 3, 2)


LONG = str(2**64)
NO_BINARY_FORM = {
    "a long seed": ("generation_params", f'{{"seed": {LONG}}}'),
    "a long number in a message": ("messages", f'[[{{"role": "user", "content": "a", "id": {LONG}}}]]'),
    "a long number in overrides": ("overrides", f'[{{"id": -{LONG}}}]'),
    "a long number of the group": ("group_overrides", f'{{"id": {{"x": [{LONG}]}}}}'),
    "a long number in images": ("images", f"[{LONG}]"),
    "a number beyond doubles": ("generation_params", f'{{"temperature": 1{"0" * 400}}}'),
}
"""JSON that the API takes, and that msgpack or numpy cannot hold."""


@pytest.mark.parametrize("kind", NO_BINARY_FORM)
async def test_group_that_cannot_be_converted_costs_itself_only(
    http: httpx.AsyncClient, client: Client, kind: str
) -> None:
    field, value = NO_BINARY_FORM[kind]
    fields = {"tokens": "[[1]]", "masks": "[[1]]", "scores": "[1.0]", "inference_logprobs": "[[-1.0]]", field: value}
    text = "{" + ", ".join(f'"{name}": {found}' for name, found in fields.items()) + "}"
    await post(http, {"group": 1, "is": 1})
    (await http.post("/scored_data", content=text, headers={"Content-Type": "application/json"})).raise_for_status()
    await post(http, {"group": 1, "is": 2})
    incarnation, _ = await client.take(RUN, settings(), [])
    batch = await client.lease(RUN, incarnation, "b1", 2, wait=0)
    assert batch is not None
    assert [group.group_id for group in batch] == ["a00000000", "a00000002"]
    (letter,) = await client.dead_letters(RUN)
    assert (letter.group_id, letter.reason.partition(":")[0]) == ("a00000001", "no_binary_form")
    kept = to_json((await http.get(f"/v1/runs/{RUN}/groups/a00000001")).content)
    assert json.loads(kept)[field] == json.loads(value), "a trainer of Atropos gets it as it came"


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("rows", [[[], [65]], [[65], []], [[]]])
async def test_empty_sequence_is_refused(http: httpx.AsyncClient, rows: list[list[int]], many: bool) -> None:
    group = {"tokens": rows, "masks": rows, "scores": [1.0] * len(rows)}
    path, body = ("/scored_data_list", [group]) if many else ("/scored_data", group)
    answer = await http.post(path, json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][-2:] == ["tokens", rows.index([])]


async def test_group_without_a_binary_form_is_archived_with_its_values_and_delays_no_run(
    redis_url: str, tmp_path: Path
) -> None:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path), API_ARCHIVE_MIN_FREE_BYTES="0") as server:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=30) as http,
            Client(server.url, patience=20) as client,
        ):
            (await http.post("/register", json={**REGISTRATION, "batch_size": 2})).raise_for_status()
            await client.take(RUN, settings(groups=1), [])
            odd = {**expand({"group": 1, "is": 1}), "generation_params": {"seed": 2**64}}
            for group in (odd, expand({"group": 1, "is": 2})):
                (await http.post("/scored_data", json=group)).raise_for_status()
            assert len((await http.get("/batch")).json()["batch"]) == 2
            await client.create_run("later", {"dataset": "d"}, 2, stack=None)
            incarnation, _ = await client.take("later", settings(groups=1), [])
            await client.record_version("later", PolicyVersion(incarnation, 0))
            (permit,) = (await client.permits("later", "env-1", 1, wait=5)).permits
            await client.submit(make_group(permit.group_id, "later"), "env-1")
            assert await client.lease("later", incarnation, "b1", 1, wait=5)
            await client.ack("later", incarnation, ["b1"])
            for run in (RUN, "later"):
                while (await client.status(run)).archiving:  # noqa: ASYNC110  the test's time-out is the bound
                    await asyncio.sleep(0.05)
            metrics = (await http.get("/metrics")).text
    assert [group.group_id for group in read_rollouts(tmp_path / "later")] == [permit.group_id]
    assert [group.tokens.tolist() for group in read_rollouts(tmp_path / RUN)] == [[1, 0], [2, 0]]
    kept, _ = read_archive(tmp_path / RUN)
    assert json.loads(to_json(kept.body))["generation_params"] == {"seed": 2**64}
    assert 'gristmill_api_task_failures_total{task="archive"}' not in metrics


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", [[2**64]]), ("tokens", [[-1]]), ("tokens", [[2**31]]), ("masks", [[-100]]), ("scores", [1e39])],
)
async def test_group_that_no_trainer_could_use_is_refused(
    http: httpx.AsyncClient, client: Client, field: str, value: object
) -> None:
    await post(http, {"group": 1, "is": 1})
    group = {"tokens": [[1]], "masks": [[1]], "scores": [1.0], field: value}
    for path, body in (("/scored_data", group), ("/scored_data_list", [expand({"group": 1, "is": 2}), group])):
        answer = await http.post(path, json=body)
        assert answer.status_code == 422
        assert field in answer.json()["detail"][0]["loc"]
    assert (await client.status(RUN)).ready == 1, "of a list none is stored"


async def test_returned_batch_is_delivered_as_json_again(http: httpx.AsyncClient, client: Client) -> None:
    (await http.post("/register", json=REGISTRATION)).raise_for_status()
    await post(http, {"group": 2, "is": 1}, {"group": 2, "is": 2})
    incarnation, _ = await client.take(RUN, settings(groups=2), [])
    assert await client.lease(RUN, incarnation, "b1", 2, wait=0) is not None
    await client.nack(RUN, incarnation, ["b1"])
    drawn = (await http.get("/batch")).json()["batch"]
    assert drawn == [expand({"group": 2, "is": 1}), expand({"group": 2, "is": 2})]


async def test_untrained_sequence_counts_in_the_mean_reward_of_its_group(
    http: httpx.AsyncClient, client: Client
) -> None:
    # They import torch. The workers that run other files need none.
    from gristmill_trainer.data.checks import Limits
    from gristmill_trainer.data.samples import to_samples
    from gristmill_trainer.data.types import Reason

    group = expand({"group": 3, "is": 1})
    group["masks"][1] = [-100, -100]
    (await http.post("/scored_data", json=group)).raise_for_status()
    incarnation, _ = await client.take(RUN, settings(), [])
    batch = await client.lease(RUN, incarnation, "b1", 1, wait=0)
    assert batch is not None
    assert batch[0].rewards.tolist() == [0.0, 1.0, 2.0], "its reward is in the mean of the group"
    limits = Limits(vocabulary=2**31, seq_len=99, policy=PolicyVersion(1, 0))
    prepared = to_samples(batch, limits, Hyperparameters(advantage_scale="none"))
    assert [(one.sequence, one.reason) for one in prepared.rejected] == [(1, Reason.NOTHING_TRAINED)]
    assert [float(one.advantages[-1]) for one in prepared.samples] == [-1.0, 1.0]
