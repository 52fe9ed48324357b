"""Environments of a run: their registration, their time-out, and their shares of permits and batches."""

from __future__ import annotations

import time

import pytest
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, submission, trainer
from tests.integration.atropos_queue.store_harness import registration, scored
from tests.support.errors import raises

from gristmill_api.atropos.messages import RegisterEnv
from gristmill_api.atropos.queue import Queue
from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import LeaseSize


async def test_environment_keeps_its_latest_registration(harness: StoreHarness) -> None:
    envs = harness.store.envs
    await envs.register(RUN, "env-1", 2.0, None)
    since = await harness.redis.hget(PREFIX + "env:env-1", "registered_ms")
    assert abs(int(since or 0) / 1000 - time.time()) < 60
    await envs.heartbeat(RUN, "env-1")
    await envs.register(RUN, "env-1", None, 0.25)
    (env,) = await envs.all(RUN)
    assert (env.weight, env.min_batch_allocation, env.alive) == (None, 0.25, True)
    assert await harness.redis.hget(PREFIX + "env:env-1", "registered_ms") == since
    await harness.redis.zadd(PREFIX + "envs", {"env-1": 1})
    await envs.heartbeat(RUN, "env-1")
    assert (await envs.all(RUN))[0].alive
    with raises(ApiProblem, "env_missing") as refused:
        await envs.heartbeat(RUN, "env-2")
    assert "'env-2'" in refused.value.message


async def test_permit_request_keeps_an_environment_alive_until_it_unregisters(harness: StoreHarness) -> None:
    await harness.start()
    await harness.store.envs.register(RUN, "env-1", 1.0, None)
    await harness.redis.zadd(PREFIX + "envs", {"env-1": 1}, xx=True)
    await harness.ask("env-1", 1)
    assert [env.alive for env in await harness.store.envs.all(RUN)] == [True]
    assert await harness.store.envs.unregister(RUN, "env-1")
    assert not await harness.store.envs.unregister(RUN, "env-1")
    assert await harness.store.envs.all(RUN) == []


async def test_unregistered_environment_leaves_nothing_in_redis(harness: StoreHarness) -> None:
    await harness.store.envs.register(RUN, "env-1", 1.0, 0.5)
    await harness.store.envs.unregister(RUN, "env-1")
    assert await harness.redis.exists(PREFIX + "env:env-1", PREFIX + "envs") == 0


async def test_permits_are_shared_by_environment_weight(harness: StoreHarness) -> None:
    await harness.start(groups=8)
    await harness.store.envs.register(RUN, "heavy", 3.0, None)
    await harness.store.envs.register(RUN, "light", 1.0, None)
    await harness.store.envs.register(RUN, "without", None, None)
    assert len(await harness.ask("light", 8)) == 2, "a quarter of 8"
    assert len(await harness.ask("heavy", 8)) == 6
    assert await harness.ask("light", 1) == []
    await harness.store.permits.release_all(RUN, "heavy")
    assert await harness.ask("light", 8) == [], "it has its share already"
    await harness.redis.zadd(PREFIX + "envs", {"heavy": 1}, xx=True)
    assert len(await harness.ask("light", 8)) == 6, "other environments may use a dead environment's share"


async def test_share_of_a_batch_is_reserved_for_a_live_environment(harness: StoreHarness) -> None:
    incarnation = await harness.start(groups=8)
    await harness.store.envs.register(RUN, "small", None, 0.5)
    big = await harness.send(*[("big", 10, 0)] * 4)
    assert await harness.lease(incarnation, "b1", 4) is None, "half of the batch is for small's groups"
    small = await harness.send(*[("small", 10, 0)] * 3)
    assert await harness.lease(incarnation, "b1", 4) == [*big[:2], *small[:2]]
    # A third of 2 groups is less than a whole group: nothing is kept.
    await harness.store.envs.register(RUN, "small", None, 0.3)
    assert await harness.lease(incarnation, "b2", 2) == big[2:]


async def test_shares_above_one_in_total_are_scaled_down(harness: StoreHarness) -> None:
    incarnation = await harness.start(groups=8)
    await harness.store.envs.register(RUN, "a", None, 1.0)
    await harness.store.envs.register(RUN, "b", None, 1.0)
    a = await harness.send(*[("a", 10, 0)] * 3)
    b = await harness.send(*[("b", 10, 0)] * 3)
    assert await harness.lease(incarnation, "b1", 4) == [*a[:2], *b[:2]]


async def test_share_of_a_dead_environment_blocks_no_lease(harness: StoreHarness) -> None:
    incarnation = await harness.start(groups=8)
    ids = await harness.send(*[("big", 10, 0)] * 2)
    await harness.store.envs.register(RUN, "gone", None, 1.0)
    assert await harness.lease(incarnation, "b1", 2) is None
    await harness.redis.zadd(PREFIX + "envs", {"gone": 1}, xx=True)
    assert [env.alive for env in await harness.store.envs.all(RUN)] == [False]
    assert await harness.lease(incarnation, "b1", 2) == ids


async def hush(harness: StoreHarness, env_id: str) -> None:
    """The environment last asked for permits long ago, and sends heartbeats."""
    assert await harness.redis.hset(PREFIX + f"env:{env_id}", "asked_ms", 1) == 0
    await harness.store.envs.heartbeat(RUN, env_id)


async def test_permits_are_reserved_for_an_environments_share_of_a_batch(harness: StoreHarness) -> None:
    """8 groups per step and no staleness: if one environment takes permits of a step, the other cannot send those
    groups."""
    incarnation = await harness.start(groups=8)
    await harness.store.envs.register(RUN, "b", None, 0.5)
    a = await harness.ask("a", 8)
    assert len(a) == 4, "half of the step is for b"
    b = await harness.ask("b", 8)
    assert len(b) == 4
    for holder, ids in (("a", a), ("b", b)):
        for group_id in ids:
            await harness.submit(holder, group_id)
    assert await harness.lease(incarnation, "b1", 8) == [*a, *b]
    await harness.store.runs.record_version(RUN, incarnation, 1)
    assert len(await harness.ask("b", 8)) == 8, "its share is not an upper bound"
    assert await harness.ask("a", 8) == []


@pytest.mark.parametrize(("unit", "amount"), [("groups", 8), ("sequences", 16)])
async def test_share_is_limited_to_groups_that_permits_still_allow(
    harness: StoreHarness, unit: str, amount: int
) -> None:
    """One environment takes the whole step before the environment with the share arrives. 6 groups are there, so it can
    send 2."""
    incarnation = await harness.start(groups=8)

    async def lease() -> list[str]:
        found = await harness.store.queue.lease(RUN, incarnation, "b1", LeaseSize(unit, amount))  # type: ignore[arg-type]
        return [leased.group_id for leased in found.groups]

    a = await harness.send(*[("a", 10, 0)] * 6)
    await harness.store.envs.register(RUN, "b", None, 0.5)
    assert await lease() == []
    b = await harness.send(*[("b", 10, 0)] * 2)
    assert await harness.ask("a", 1) == await harness.ask("b", 1) == []
    assert await lease() == [*a, *b]


async def test_share_waits_only_for_outstanding_permits_of_its_environment(harness: StoreHarness) -> None:
    incarnation = await harness.start(groups=4)
    a = await harness.send(*[("a", 10, 0)] * 2)
    (held,) = await harness.ask("c", 1)
    await harness.store.envs.register(RUN, "b", None, 0.5)
    (own,) = await harness.ask("b", 1)
    assert await harness.lease(incarnation, "b1", 2) is None, "one of them is to be b's, which holds a permit"
    await harness.expire_permits(own)
    await hush(harness, "b")
    assert await harness.lease(incarnation, "b1", 2) == a, "c's permit is nothing to wait for, nor is one that ran out"
    await harness.submit("c", held)


async def test_environment_that_only_sends_heartbeats_reserves_no_share(harness: StoreHarness) -> None:
    incarnation = await harness.start(groups=8)
    await harness.store.envs.register(RUN, "idle", None, 1.0)
    assert await harness.ask("a", 8) == [], "it has just registered, and may ask"
    await hush(harness, "idle")
    a = await harness.send(*[("a", 10, 0)] * 4)
    assert await harness.lease(incarnation, "b1", 2) == a[:2]
    assert await harness.ask("idle", 1) != []
    assert await harness.ask("a", 8) == [], "it asks again, and the rest is for it"
    assert await harness.lease(incarnation, "b2", 2) is None


async def test_ready_groups_count_for_a_share_even_if_the_environment_stops_asking(harness: StoreHarness) -> None:
    incarnation = await harness.start(groups=8)
    a = await harness.send(*[("a", 10, 0)] * 3)
    await harness.store.envs.register(RUN, "b", None, 0.5)
    b = await harness.send(*[("b", 10, 0)] * 1)
    await hush(harness, "b")
    assert await harness.lease(incarnation, "b1", 2) == [a[0], *b]


async def test_two_shares_that_cannot_both_be_met_do_not_block_each_other(harness: StoreHarness) -> None:
    """One permit is left, and each of them lacks four groups. Neither waits for the other forever."""
    incarnation = await harness.start(groups=8)
    a = await harness.send(*[("a", 10, 0)] * 7)
    for env_id in ("b", "c"):
        await harness.store.envs.register(RUN, env_id, None, 0.5)
    assert await harness.ask("a", 1) == await harness.ask("c", 1) == []
    assert await harness.lease(incarnation, "b1", 8) is None
    b = await harness.send(("b", 10, 0))
    assert await harness.lease(incarnation, "b1", 8) == [*a, *b]


async def test_share_smaller_than_a_group_blocks_no_lease(harness: StoreHarness) -> None:
    """A fifth of 16 sequences is less than a group of 4. Two fifths are one group and a remainder, which is not
    kept."""
    await harness.store.runs.create("other", {}, 4, stack=None)
    record = await harness.store.runs.take("other", trainer(groups=16), [])
    await harness.store.runs.record_version("other", record.incarnation, 0)
    await harness.store.envs.register("other", "b", None, 0.2)

    async def send(env_id: str, count: int) -> list[str]:
        ids = [permit.group_id for permit in (await harness.store.permits.grant("other", env_id, count)).permits]
        for group_id in ids:
            await harness.store.queue.submit("other", env_id, submission(group_id, env_id=env_id, sequences=4))
        return ids

    async def lease(name: str) -> list[str]:
        batch = await harness.store.queue.lease("other", record.incarnation, name, LeaseSize("sequences", 16))
        return [leased.group_id for leased in batch.groups]

    first = await send("a", 4)
    assert await lease("b1") == first
    await harness.store.envs.register("other", "b", None, 0.4)
    a = await send("a", 1)
    assert await lease("b2") == [], "b asks, and one group is to be its"
    b = await send("b", 1)
    a += await send("a", 2)
    assert await lease("b2") == [a[0], b[0], *a[1:]]


async def test_store_records_when_an_environment_last_asked_for_permits(harness: StoreHarness) -> None:
    """The store records a request when the last recorded request is older than a tenth of an environment's time-out."""
    await harness.start()
    await harness.store.envs.register(RUN, "env-1", None, 0.5)
    key = PREFIX + "env:env-1"
    registered = int(await harness.redis.hget(key, "asked_ms") or 0)
    await harness.redis.hset(key, "asked_ms", registered - 5_000)
    await harness.ask("env-1", 1)
    assert int(await harness.redis.hget(key, "asked_ms") or 0) == registered - 5_000
    await harness.redis.hset(key, "asked_ms", registered - 7_000)
    await harness.ask("env-1", 1)
    assert int(await harness.redis.hget(key, "asked_ms") or 0) >= registered


async def test_share_of_an_atropos_environment_applies_to_its_ready_groups(harness: StoreHarness) -> None:
    """A trainer of /v1 leases the groups that Atropos' environments send at the root."""
    queue = Queue(harness.store, Limits(), "default")
    await queue.register(registration())
    record = await harness.store.runs.take("default", trainer(), [])
    await harness.store.runs.record_version("default", record.incarnation, 0)
    numbers = []
    for share in (None, 0.5):
        facts = RegisterEnv(max_token_length=64, desired_name="e", weight=1.0, group_size=2, min_batch_allocation=share)
        env = await queue.register_env(facts)
        assert env is not None
        numbers.append(env.number)
    for number, receipt in ((numbers[0], "r1"), (numbers[0], "r2"), (numbers[0], "r3"), (numbers[1], "r4")):
        await queue.submit(receipt, [scored(2, number)])

    async def lease(name: str) -> list[str]:
        batch = await harness.store.queue.lease("default", record.incarnation, name, LeaseSize("sequences", 4))
        return [leased.group_id for leased in batch.groups]

    assert await lease("b1") == ["a00000000", "a00000003"]
    assert await lease("b2") == ["a00000001", "a00000002"], "nothing of the other is ready, and none is waited for"
