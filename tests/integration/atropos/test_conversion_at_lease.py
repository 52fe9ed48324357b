"""A trainer of Gristmill on the run that Atropos' environments feed: it leases binary groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from tests.integration.api.store_harness import trainer as settings
from tests.integration.atropos.conversation import expand
from tests.support.api_server import ApiServer
from tests.support.redis_server import RedisServer

from gristmill import Client, PolicyVersion
from gristmill.hyperparameters import Hyperparameters
from gristmill_api.routes.lease import _KEPT_BYTES
from gristmill_trainer.data.checks import Limits
from gristmill_trainer.data.samples import to_samples
from gristmill_trainer.data.types import Reason

RUN = "default"


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


async def test_lease_converts_its_answer_and_leaves_the_stored_json_unchanged(
    http: httpx.AsyncClient, client: Client
) -> None:
    await post(http, {"group": 2, "is": 1})
    path = f"/v1/runs/{RUN}/groups/a00000000"
    posted, size = await http.get(path), (await client.status(RUN)).bytes
    assert posted.json() == expand({"group": 2, "is": 1})
    incarnation, _ = await client.take(RUN, settings(), [])
    assert await client.lease(RUN, incarnation, "b1", 1, wait=0) is not None
    after = await http.get(path)
    assert (after.content, after.headers["content-type"]) == (posted.content, posted.headers["content-type"])
    status = await client.status(RUN)
    assert (status.bytes, status.bytes_by_state["leased"], size) == (len(posted.content),) * 3


async def test_batch_larger_than_the_lease_buffer_is_answered_completely(
    http: httpx.AsyncClient, client: Client
) -> None:
    length = 300_000
    groups: list[dict[str, object]] = [{"group": 2, "is": number, "long": length} for number in range(4)]
    await post(http, *groups, {"group": 2, "is": 4})
    incarnation, _ = await client.take(RUN, settings(groups=5), [])
    batch = await client.lease(RUN, incarnation, "b1", 5, wait=0)
    assert batch is not None
    assert sum(len(group.encode()) for group in batch[:4]) > _KEPT_BYTES
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


async def test_returned_batch_is_delivered_as_json_again(http: httpx.AsyncClient, client: Client) -> None:
    registration = {
        **dict.fromkeys(("wandb_group", "wandb_project", "checkpoint_dir"), ""),
        **dict.fromkeys(("max_token_len", "save_checkpoint_interval", "starting_step", "num_steps"), 9),
        "batch_size": 4,
    }
    (await http.post("/register", json=registration)).raise_for_status()
    await post(http, {"group": 2, "is": 1}, {"group": 2, "is": 2})
    incarnation, _ = await client.take(RUN, settings(), [])
    assert await client.lease(RUN, incarnation, "b1", 2, wait=0) is not None
    await client.nack(RUN, incarnation, ["b1"])
    drawn = (await http.get("/batch")).json()["batch"]
    assert drawn == [expand({"group": 2, "is": 1}), expand({"group": 2, "is": 2})]


async def test_untrained_sequence_counts_in_the_mean_reward_of_its_group(
    http: httpx.AsyncClient, client: Client
) -> None:
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
