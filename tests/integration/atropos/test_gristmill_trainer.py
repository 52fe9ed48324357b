"""A trainer of Gristmill and environments of Atropos' on one run: each receives the other's data in its own
protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.integration.api.store_harness import trainer as settings
from tests.integration.atropos.conversation import expand
from tests.support.api_server import ApiServer
from tests.support.redis_server import RedisServer

from gristmill import AtroposRegistration, Client, PolicyVersion, Protocol

RUN = "default"
REGISTRATION = AtroposRegistration(batch_size=8, max_token_len=64, num_steps=3, save_checkpoint_interval=2)
ENVIRONMENT = {"max_token_length": 64, "desired_name": "sums", "weight": 1.0, "group_size": 2}


@pytest.fixture
async def http(redis_url: str, shared_redis: RedisServer) -> AsyncIterator[httpx.AsyncClient]:
    with ApiServer(shared_redis.api_url) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            yield client


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[Client]:
    async with Client(str(http.base_url), patience=10) as client:
        yield client


async def _registered(http: httpx.AsyncClient) -> dict[str, Any]:
    answer: dict[str, Any] = (await http.post("/register-env", json=ENVIRONMENT)).json()
    return answer


async def _status(http: httpx.AsyncClient, env_id: int) -> dict[str, Any]:
    answer = await http.request("GET", "/status-env", json={"env_id": env_id})
    found: dict[str, Any] = answer.json()
    return found


async def test_environments_wait_for_the_trainers_first_weights_and_follow_its_steps(
    http: httpx.AsyncClient, client: Client
) -> None:
    await client.register_atropos(REGISTRATION)
    assert (await client.get_run(RUN)).protocol is Protocol.ATROPOS
    incarnation, _ = await client.take(RUN, settings(steps=3), [])
    assert (await _registered(http))["status"] == "wait for trainer to start"
    await client.record_version(RUN, PolicyVersion(incarnation, 0))
    joined = await _registered(http)
    assert (joined["status"], joined["starting_step"], joined["num_steps"]) == ("success", 0, 3)
    assert (await http.get("/info")).json() == {"batch_size": 8, "max_token_len": 64}
    await client.record_version(RUN, PolicyVersion(incarnation, 2))
    assert (await _status(http, joined["env_id"]))["current_step"] == 2
    assert (await http.get("/status")).json()["current_step"] == 2


async def test_restarted_trainer_continues_with_the_same_environments(http: httpx.AsyncClient, client: Client) -> None:
    await client.register_atropos(REGISTRATION)
    first, _ = await client.take(RUN, settings(steps=3), [])
    await client.record_version(RUN, PolicyVersion(first, 2))
    env = (await _registered(http))["env_id"]
    await client.register_atropos(REGISTRATION)
    second, _ = await client.take(RUN, settings(steps=3), [])
    await client.record_version(RUN, PolicyVersion(second, 1))
    assert (await _status(http, env))["current_step"] == 1


async def test_environments_receive_the_batch_size_and_the_steps_of_the_trainer_that_took_the_run(
    http: httpx.AsyncClient, client: Client
) -> None:
    for batch_size, steps in ((8, 3), (64, 5)):
        await client.register_atropos(REGISTRATION.model_copy(update={"batch_size": batch_size, "num_steps": steps}))
        incarnation, _ = await client.take(RUN, {**settings(steps=steps), "batch_size": batch_size}, [])
        await client.record_version(RUN, PolicyVersion(incarnation, 0))
        assert (await http.get("/info")).json()["batch_size"] == batch_size
        assert (await _registered(http))["num_steps"] == steps


async def test_finished_run_makes_base_env_stop(http: httpx.AsyncClient, client: Client) -> None:
    await client.register_atropos(REGISTRATION)
    incarnation, _ = await client.take(RUN, settings(steps=3), [])
    await client.record_version(RUN, PolicyVersion(incarnation, 3))
    env = (await _registered(http))["env_id"]
    before = await _status(http, env)
    assert before["queue_size"] == 0
    await client.finish(RUN, incarnation)
    after = await _status(http, env)
    # BaseEnv ends by this rule, whatever its total_steps is.
    assert after["current_step"] + after["queue_size"] * 2 // 8 > 1_000_000


async def test_lease_by_sequences_includes_old_groups(http: httpx.AsyncClient, client: Client) -> None:
    await client.register_atropos(REGISTRATION)
    incarnation, _ = await client.take(RUN, settings(steps=9), [])
    await client.record_version(RUN, PolicyVersion(incarnation, 0))
    for size in (2, 4, 3, 2):
        (await http.post("/scored_data", json=expand({"group": size, "is": size}))).raise_for_status()
    await client.record_version(RUN, PolicyVersion(incarnation, 7))
    batch = await client.lease(RUN, incarnation, "b1", sequences=8, wait=0)
    assert batch is not None
    # The group of three does not fit and keeps its place.
    assert [group.size for group in batch] == [2, 4, 2]
    assert {str(group.oldest_version) for group in batch} == {f"{incarnation}.0"}


async def test_group_without_logprobs_is_leased_and_marked(http: httpx.AsyncClient, client: Client) -> None:
    bare = {"tokens": [[1, 5], [1, 6]], "masks": [[-100, 5], [-100, 6]], "scores": [1.0, 0.0]}
    (await http.post("/scored_data", json=bare)).raise_for_status()
    incarnation, _ = await client.take(RUN, settings(), [])
    batch = await client.lease(RUN, incarnation, "b1", sequences=2, wait=0)
    assert batch is not None
    assert not batch[0].logprobs_known
    assert batch[0].mask.tolist() == [False, True, False, True]
