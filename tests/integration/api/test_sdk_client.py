"""The SDK's clients read groups, dead letters, metrics, environments and events from a real API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.api.store_harness import RUN, trainer
from tests.support.api_server import ApiServer
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.redis_server import RedisServer

from gristmill import ApiError, Client, PolicyVersion, SyncClient


@pytest.fixture(scope="module")
def api(shared_redis: RedisServer) -> Iterator[ApiServer]:
    """An API that makes a group a dead letter after one lease without an ack."""
    with ApiServer(shared_redis.api_url, API_MAX_ATTEMPTS="1") as server:
        yield server


@pytest.fixture
def client(redis_url: str, api: ApiServer) -> Iterator[SyncClient]:
    """A client of a run with two groups, the first of which is a dead letter."""
    with SyncClient(api.url, patience=10) as client:
        client.create_run(RUN, {"dataset": "d"}, 2)
        incarnation, _ = client.take(RUN, trainer(), [])
        client.record_version(RUN, PolicyVersion(incarnation, 0))
        for row in range(2):
            (permit,) = client.permits(RUN, "env-1", 1, wait=5).permits
            client.submit(make_group(permit.group_id, RUN, seed=row), "env-1")
        client.lease(RUN, incarnation, "b1", 1, wait=0)
        assert client.nack(RUN, incarnation, ["b1"]) == 1
        client.lease(RUN, incarnation, "b2", 1, wait=0)
        yield client


def test_client_reads_a_group_as_it_was_submitted_and_as_an_example(client: SyncClient) -> None:
    group = client.read_group(RUN, "g00000001")
    assert group.encode() == make_group("g00000001", RUN, seed=1).encode()
    example = client.read_example(RUN, "g00000001")
    assert (example.group_id, example.lengths) == ("g00000001", group.lengths.tolist())
    assert example in client.examples(RUN, 2)
    with raises(ApiError, "group_missing"):
        client.read_group(RUN, "g00000099")


def test_client_replays_and_purges_dead_letters(client: SyncClient) -> None:
    assert [letter.group_id for letter in client.dead_letters(RUN)] == ["g00000000"]
    assert client.dead_letters(RUN, offset=1) == []
    assert client.replay_dead_letters(RUN, ["g00000000"]) == 1
    assert client.audit(RUN).ready == ["g00000000"]
    assert client.purge_dead_letters(RUN) == 0


def test_client_lists_runs_environments_and_metrics(client: SyncClient) -> None:
    assert [run.run_id for run in client.list_runs()] == [RUN]
    assert client.list_runs(offset=1) == []
    client.register_env(RUN, "env-1", weight=2.0)
    (env,) = client.environments(RUN)
    assert (env.env_id, env.weight, env.alive) == ("env-1", 2.0, True)
    client.report_metrics(RUN, "trainer", 1, {"loss": float("nan")})
    client.report_metrics(RUN, "trainer", 2, {"loss": 0.5})
    assert client.metric_sources(RUN) == ["trainer"]
    assert [row.values for row in client.metrics(RUN, "trainer")] == [{"loss": "nan"}, {"loss": 0.5}]
    assert [row.step for row in client.metrics(RUN, "trainer", limit=1)] == [1]


async def test_both_clients_follow_the_events_of_a_run(client: SyncClient, api: ApiServer) -> None:
    blocking = client.events(RUN, after="0-0")
    events = [next(blocking) for _ in range(3)]
    blocking.close()
    assert [event.kind for event in events] == ["open", "take", "version"]
    async with Client(api.url, patience=10) as other:
        following = other.events(RUN, after=events[0].id)
        assert [(await anext(following)).id for _ in range(2)] == [events[1].id, events[2].id]
        await following.aclose()
