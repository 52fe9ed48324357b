"""Environments of Atropos' protocol: registration, silence, disconnection, and the registry of both protocols."""

from __future__ import annotations

import time

import pytest
from tests.integration.api.event_listener import EventListener
from tests.integration.atropos_queue.store_harness import (
    RUN,
    START,
    StoreHarness,
    event_fields,
    registration,
)
from tests.support.errors import raises

from gristmill_api.atropos import queue
from gristmill_api.atropos.messages import RegisterEnv
from gristmill_api.errors import ApiProblem


async def test_environment_can_register_only_after_the_first_batch_request(harness: StoreHarness) -> None:
    await harness.queue.register(registration(batch_size=8, starting_step=2))
    facts = RegisterEnv(max_token_length=64, desired_name="e", weight=0.5, group_size=4, min_batch_allocation=0.25)
    assert await harness.queue.register_env(facts) is None
    assert await harness.lend("b") is None
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    first = await harness.queue.register_env(facts)
    assert first is not None
    assert (first.number, first.namesakes, first.trainer["batch_size"], first.trainer["step"]) == (0, 0, "8", "2")
    assert await listener.recorded() == (set(), [event_fields("register_env", env=0, name="e")])
    await listener.close()
    assert await harness.env(group_size=2, name="other") == 1
    again = await harness.queue.register_env(facts)
    assert again is not None
    assert (again.number, again.namesakes) == (2, 1)
    view = await harness.queue.env(0)
    assert view is not None
    assert (view.step, view.batch_size, view.group_size, view.shares) == (2, 8, 4, {"0": 0.25, "2": 0.25})
    assert (view.own.max_context_len, view.own.weight, len(view.connected)) == (64, 0.5, 3)
    assert await harness.queue.env(3) is None


async def test_environments_of_both_protocols_are_in_one_registry(harness: StoreHarness) -> None:
    await harness.start()
    here, gone = await harness.env(share=0.25), await harness.env()
    await harness.queue.disconnect(gone)
    found = {env.env_id: (env.weight, env.min_batch_allocation, env.alive) for env in await harness.store.envs.all(RUN)}
    assert found == {str(here): (1.0, 0.25, True), str(gone): (1.0, None, False)}
    assert (await harness.store.runs.status(RUN)).envs == 1
    with raises(ApiProblem, "no_permits"):
        await harness.store.envs.register(RUN, str(here), 2.0, None)
    with raises(ApiProblem, "env_missing"):
        await harness.store.envs.heartbeat(RUN, str(here))
    assert not await harness.store.envs.unregister(RUN, str(here))
    view = await harness.queue.env(here)
    assert view is not None
    assert view.own.weight == 1.0


async def test_environment_of_v1_with_a_numeric_name_is_unknown_to_atropos_protocol(
    harness: StoreHarness,
) -> None:
    await harness.store.runs.create(RUN, {}, 2, stack=None)
    await harness.store.envs.register(RUN, "0", 1.0, None)
    assert not await harness.queue.disconnect(0)
    assert await harness.queue.env(0) is None
    assert [env.alive for env in await harness.store.envs.all(RUN)] == [True]


async def test_live_environments_of_atropos_protocol_do_not_change_the_refusal_to_replace(
    harness: StoreHarness,
) -> None:
    await harness.start()
    await harness.env()
    with raises(ApiProblem, "config_differs") as refused:
        await harness.store.runs.create(RUN, {}, 2, stack=None)
    assert refused.value.retry_after is None, "it is never replaced, whether environments are alive or not"


async def test_registrations_are_bounded_until_a_reset(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MOST_ENVS", 2)
    await harness.start()
    assert [await harness.env(), await harness.env()] == [0, 1]
    with pytest.raises(ApiProblem) as refused:
        await harness.env()
    assert refused.value.code == "too_many_envs"
    await harness.queue.reset()
    await harness.start()
    assert await harness.env() == 0


async def test_disconnected_and_silent_environments_do_not_count(harness: StoreHarness) -> None:
    await harness.start()
    for number in range(12):
        assert await harness.env(share=0.1, name=str(number)) == number
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    assert await listener.recorded(harness.queue.disconnect(1)) == (set(), [event_fields("disconnect_env", env=1)])
    assert not await harness.queue.disconnect(12)
    await listener.close()
    await harness.silence(2)
    view = await harness.queue.env(0)
    assert view is not None
    assert sorted(view.shares, key=int) == [str(number) for number in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11)]
    assert len(view.connected) == 10
    assert len(dict.fromkeys(map(str, view.shares))) == 10
    view = await harness.queue.env(2)
    assert view is not None
    assert "2" in view.shares, "a request counts as a sign of life"
    for number in range(12):
        await harness.silence(number)
    view = await harness.queue.env(1)
    assert view is not None
    assert (view.connected, view.shares) == ([], {}), "who said goodbye is gone whatever it asks"


async def test_disconnected_environment_is_dead_and_was_seen_lately(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env()
    await harness.queue.disconnect(number)
    (listed,) = await harness.store.envs.all(RUN)
    assert not listed.alive
    assert listed.last_seen_s is not None
    assert listed.last_seen_s < harness.limits.env_ttl_s + 60


async def test_recent_heartbeat_is_not_written_again(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env()
    silence_ms = harness.limits.env_ttl_s * 1000
    for ago, written in ((0.05, False), (0.15, True)):
        deadline = int(time.time() * 1000 + (1 - ago) * silence_ms)
        await harness.redis.zadd(START + "envs", {str(number): deadline})
        await harness.queue.env(number)
        assert (await harness.redis.zscore(START + "envs", str(number)) != deadline) == written


async def test_a_status_does_not_read_all_environments_that_ever_disconnected(harness: StoreHarness) -> None:
    await harness.start()
    here, *gone = [await harness.env() for _ in range(4)]
    for number in gone:
        await harness.queue.disconnect(number)

    async def read() -> int:
        return int((await harness.redis.info("commandstats")).get("cmdstat_smembers", {}).get("calls", 0))

    before = await read()
    view = await harness.queue.env(here)
    assert view is not None
    assert len(view.connected) == 1
    assert await read() == before
