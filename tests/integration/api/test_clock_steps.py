"""Steps of the clock: leases and permits expire early or late. No group is lost or trained twice because of that.

Redis' clock is the only clock (see now() in _keys.lua). It cannot be set here without setting the machine's clock. The
store compares the clock only with the deadlines that it keeps. So moving those deadlines the other way equals a step of
the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import RUN, StoreHarness
from tests.support.api_server import ApiServer
from tests.support.errors import raises
from tests.support.scripted_run import ENV, GROUP_SIZE, expected_group, plan

from gristmill import LeaseLostError, LeaseSession, SyncClient
from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import keys
from gristmill_api.store.scripts import Scripts

HOUR_MS = 3_600_000


async def step_clock(redis: Redis, ms: int) -> None:
    """Moves Redis' clock forward by this time, or back."""
    for kind in ("leases", "permits", "envs"):
        key = keys.prefix(RUN) + kind
        deadlines: list[tuple[bytes, float]] = await redis.zrange(key, 0, -1, withscores=True)  # type: ignore[assignment]
        for member, deadline in deadlines:
            await redis.zadd(key, {member: deadline - ms})


async def test_clock_step_forward_redelivers_a_batch_and_refuses_the_first_ack(
    harness: StoreHarness, redis: Redis
) -> None:
    incarnation = await harness.start()
    ids = await harness.fill(2)
    assert await harness.lease(incarnation, "b1", 2) == ids
    await step_clock(redis, HOUR_MS)
    assert await harness.lease(incarnation, "b2", 2) == ids, "the ids show that these are the same groups"
    assert (await harness.store.queue.ack(RUN, incarnation, ["b1"])).lost == ["b1"]
    assert (await harness.store.queue.ack(RUN, incarnation, ["b2"])).groups == 2
    assert await harness.whereabouts() == {"trained": ids}


@pytest.mark.parametrize("verb", ["ack", "extend", "lease"])
async def test_clock_step_forward_keeps_a_batch_with_its_trainer_if_not_leased_again(
    harness: StoreHarness, redis: Redis, verb: str
) -> None:
    incarnation = await harness.start()
    ids = await harness.fill(2)
    await harness.lease(incarnation, "b1", 2)
    await step_clock(redis, HOUR_MS)
    assert await harness.lease(incarnation, "b2", 3) is None, "this finds that the lease ran out"
    if verb == "extend":
        assert await harness.store.queue.extend(RUN, incarnation, ["b1"]) == []
    if verb == "lease":
        assert await harness.lease(incarnation, "b1", 2) == ids
    if verb != "ack":
        assert await harness.whereabouts() == {"leased": ids}
    assert (await harness.store.queue.ack(RUN, incarnation, ["b1"])).lost == []
    assert await harness.whereabouts() == {"trained": ids}


async def test_clock_step_forward_keeps_a_permit_until_another_environment_asks(
    harness: StoreHarness, redis: Redis
) -> None:
    await harness.start()
    first, second = await harness.ask("env-1", 2)
    await step_clock(redis, HOUR_MS)
    assert await harness.ask("env-2", 3) == [first, second, "g00000002"]
    with pytest.raises(ApiProblem) as refused:
        await harness.submit("env-1", first)
    assert refused.value.code == "permit_lost"
    assert await harness.submit("env-2", first)
    await step_clock(redis, HOUR_MS)
    assert await harness.submit("env-2", second), "overdue, and no trainer asked for it"
    assert (await harness.whereabouts())["ready"] == [first, second]


async def test_clock_step_back_extends_dead_leases_but_the_next_trainer_does_not_wait(
    harness: StoreHarness, redis: Redis
) -> None:
    incarnation = await harness.start()
    ids = await harness.fill(2)
    await harness.lease(incarnation, "b1", 2)
    await step_clock(redis, -HOUR_MS)
    assert await harness.lease(incarnation, "b2", 2) is None
    incarnation = await harness.start()
    assert await harness.lease(incarnation, "b1", 2) == ids


async def test_clock_step_back_extends_dead_permits_until_they_are_released(
    harness: StoreHarness, redis: Redis
) -> None:
    await harness.start()
    ids = await harness.ask("env-1", 4)
    await step_clock(redis, -HOUR_MS)
    assert await harness.ask("env-2", 4) == []
    assert await harness.store.permits.release_all(RUN, "env-1") == 4
    assert await harness.ask("env-2", 4) == ids


def test_clock_step_forward_never_makes_a_trainer_repeat_its_own_groups(redis_url: str, shared_api: ApiServer) -> None:
    """The trainer's lease expired while it slept. A lease of the next step would contain the groups that it has just
    trained on."""

    async def sleep_for_an_hour() -> None:
        async with Redis.from_url(redis_url) as redis:
            await step_clock(redis, HOUR_MS)

    with SyncClient(shared_api.url, patience=10) as client:
        client.create_run(RUN, ENV, GROUP_SIZE)
        with LeaseSession(client, RUN, plan(10)) as session:
            session.record_version(0)
            for permit in client.permits(RUN, "env-1", 4, wait=0).permits:
                client.submit(expected_group(RUN, permit.group_id), "env-1")
            first = session.lease(1, wait=0)
            assert first is not None
            session.trained(1)
            asyncio.run(sleep_for_an_hour())
            ids = [group.group_id for group in first]
            with raises(LeaseLostError, "lease_lost", batches=["1.2"], groups=ids):
                session.lease(2, wait=0)
        incarnation, _ = client.take(RUN, plan(10), [])
        again = client.lease(RUN, incarnation, "b1", 4, wait=0)
        assert again is not None
        assert [group.group_id for group in again] == [group.group_id for group in first]


async def test_no_store_script_receives_the_apis_clock_time(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So two API processes, or one whose clock is wrong, do no harm. A time of day is over 10^9 in any unit."""
    heard: list[str | bytes | int] = []
    run = Scripts.run

    async def listening(
        self: Scripts, name: str, prefix: str, *args: str | bytes | int, payloads: Mapping[str, bytes] | None = None
    ) -> list[Any]:
        heard.extend(args)
        return await run(self, name, prefix, *args, payloads=payloads)

    monkeypatch.setattr(Scripts, "run", listening)
    incarnation = await harness.start()
    await harness.store.envs.register(RUN, "env-1", None)
    await harness.store.envs.heartbeat(RUN, "env-1")
    await harness.fill(3)
    await harness.store.permits.renew(RUN, "env-1", None)
    await harness.lease(incarnation, "b1", 2)
    await harness.store.queue.extend(RUN, incarnation, ["b1"])
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    await harness.store.runs.finish(RUN, incarnation)
    numbers = {float(arg) for arg in heard if isinstance(arg, int) or (isinstance(arg, str) and arg.isdecimal())}
    caps = {float(Limits().max_stored_bytes), float(Limits().max_run_bytes)}
    assert {number for number in numbers if number > 1e9} == caps
