"""The caps of one run and of all runs in Redis: the store refuses groups beyond a cap, and has room again after an
ack."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError
from tests.integration.api.store_harness import RUN, StoreHarness, submission, trainer
from tests.support.errors import raises

from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import Store


async def assert_full(harness: StoreHarness, group_id: str, *quoted: str) -> None:
    """The store refuses the group, with an error that quotes these values."""
    with raises(ApiProblem, "store_full") as refused:
        await harness.submit("env-1", group_id)
    assert (refused.value.status, refused.value.headers()) == (429, {"Retry-After": "2"})
    assert [value for value in quoted if value not in str(refused.value)] == []


async def test_store_accepts_groups_up_to_each_cap_and_refuses_more(harness: StoreHarness) -> None:
    await harness.start()
    a, b, c, d = await harness.ask("env-1", 4)
    harness.store = Store(harness.redis, Limits(max_stored_bytes=100, max_run_bytes=100, max_run_groups=1))
    assert await harness.submit("env-1", a)
    harness.store = Store(harness.redis, Limits(max_stored_bytes=100))
    await assert_full(harness, b, " 100", "API_MAX_STORED_BYTES")
    harness.store = Store(harness.redis, Limits(max_run_bytes=200))
    assert await harness.submit("env-1", b)
    await assert_full(harness, c, repr(RUN), " 2 ", " 200 ", "API_MAX_RUN_BYTES")
    harness.store = Store(harness.redis, Limits(max_run_groups=3))
    assert await harness.submit("env-1", c)
    await assert_full(harness, d, repr(RUN), " 3 ", "API_MAX_RUN_GROUPS")


async def test_groups_in_every_state_count_against_the_cap(harness: StoreHarness) -> None:
    """Leased and dead groups, and groups that wait for the archive, all hold memory."""
    harness.store = Store(harness.redis, Limits(max_attempts=1), archive=True)
    incarnation = await harness.start(groups=8)
    await harness.fill(4)
    await harness.lease(incarnation, "b1", 1)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    await harness.lease(incarnation, "b2", 1)
    await harness.store.queue.nack(RUN, incarnation, ["b2"])
    await harness.lease(incarnation, "b3", 1)
    status = await harness.store.runs.status(RUN)
    assert (status.ready, status.leased, status.dead, status.archiving, status.trained) == (1, 1, 1, 1, 1)
    (more,) = await harness.ask("env-1", 1)
    harness.store = Store(harness.redis, Limits(max_run_groups=4))
    await assert_full(harness, more, repr(RUN), " 4 ", "API_MAX_RUN_GROUPS")
    harness.store = Store(harness.redis, Limits(max_run_groups=5))
    assert await harness.submit("env-1", more)


async def test_the_byte_cap_holds_and_an_ack_makes_room(redis: Redis) -> None:
    harness = StoreHarness(Store(redis, Limits(max_stored_bytes=250)), redis)
    await harness.create()
    incarnation = await harness.start()
    a, b, c = await harness.ask("env-1", 3)
    await harness.submit("env-1", a)
    await harness.submit("env-1", b)
    await assert_full(harness, c, "200 ", " 100 ", " 250", "API_MAX_STORED_BYTES")
    assert not await harness.submit("env-1", a), "a retry needs no room"
    assert (await harness.whereabouts())["outstanding"] == [c], "the permit is kept for the retry"
    await harness.lease(incarnation, "b1", 1)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert await harness.submit("env-1", c)


async def test_a_runs_caps_hold(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    a, b, c, d = await harness.ask("env-1", 4)
    harness.store = Store(harness.redis, Limits(max_run_bytes=250))
    await harness.submit("env-1", a)
    await harness.submit("env-1", b)
    await assert_full(harness, c, repr(RUN), " 2 ", " 200 ", "API_MAX_RUN_BYTES")
    harness.store = Store(harness.redis, Limits(max_run_groups=2))
    await assert_full(harness, c, repr(RUN), "API_MAX_RUN_GROUPS")
    await harness.lease(incarnation, "b1", 1)
    await assert_full(harness, c, repr(RUN))
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert await harness.submit("env-1", c)
    assert (await harness.whereabouts())["outstanding"] == [d]


async def sets(redis: Redis) -> int:
    """Returns how often Redis was sent a SET, refused ones included. A SET writes a payload."""
    stats = (await redis.info("commandstats")).get("cmdstat_set", {})
    return int(stats.get("calls", 0)) + int(stats.get("rejected_calls", 0))


@pytest.mark.parametrize(
    "limits",
    [Limits(max_stored_bytes=100), Limits(max_run_bytes=100), Limits(max_run_groups=1)],
    ids=["all runs' bytes", "run's bytes", "run's groups"],
)
async def test_a_submit_to_a_full_store_does_not_write_its_payload(redis: Redis, limits: Limits) -> None:
    harness = StoreHarness(Store(redis, limits), redis)
    await harness.create()
    incarnation = await harness.start()
    a, b, c = await harness.ask("env-1", 3)
    assert await harness.submit("env-1", a)
    large = submission(c, size=5_000_000)
    before = await sets(redis)
    with pytest.raises(ApiProblem):
        await harness.store.queue.submit(RUN, "env-1", large)
    assert await sets(redis) == before, "a large payload is sent only if there is room"
    for _ in range(4):
        await assert_full(harness, b)
    assert await sets(redis) <= before + 1, "a small one is sent once, and then only if there is room"
    assert await redis.keys("*:sent:*") == []
    await harness.lease(incarnation, "b1", 1)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert await harness.submit("env-1", b)
    assert not await harness.submit("env-1", b)
    harness.store = Store(redis, Limits())
    assert await harness.store.queue.submit(RUN, "env-1", large)
    assert len((await harness.whereabouts())["ready"]) == 2


async def test_a_submit_to_another_run_does_not_make_a_full_run_write_payloads(redis: Redis) -> None:
    harness = StoreHarness(Store(redis, Limits(max_run_groups=1)), redis)
    await harness.create()
    await harness.start()
    a, b = await harness.ask("env-1", 2)
    assert await harness.submit("env-1", a)
    await assert_full(harness, b)
    store = harness.store
    await store.runs.create("other", {}, 2, stack=None)
    taken = await store.runs.take("other", trainer(), [])
    await store.runs.record_version("other", taken.incarnation, 0)
    (permit,) = (await store.permits.grant("other", "env-1", 1)).permits
    assert await store.queue.submit("other", "env-1", submission(permit.group_id))
    before = await sets(redis)
    await assert_full(harness, b)
    assert await sets(redis) == before


async def test_a_submit_to_a_redis_at_its_maxmemory_does_not_write_its_payload(harness: StoreHarness) -> None:
    await harness.start()
    a, b = await harness.ask("env-1", 2)
    await harness.redis.config_set("maxmemory", 1)
    try:
        for _ in range(3):
            with pytest.raises(OutOfMemoryError):
                await harness.submit("env-1", a)
        before = await sets(harness.redis)
        for _ in range(3):
            with pytest.raises(OutOfMemoryError):
                await harness.submit("env-1", a)
        assert await sets(harness.redis) == before
    finally:
        await harness.redis.config_set("maxmemory", 0)
    assert await harness.submit("env-1", a)
    before = await sets(harness.redis)
    assert await harness.submit("env-1", b)
    assert await sets(harness.redis) == before + 1
