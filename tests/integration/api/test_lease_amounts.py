"""Leases by groups, sequences and tokens: which groups make a batch, and how far a lease searches for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, trainer

from gristmill_api.settings import Limits
from gristmill_api.store import LeaseSize, Store


async def lease(harness: StoreHarness, incarnation: int, name: str, unit: str, count: int, **more: object) -> list[str]:
    amount = LeaseSize(unit, count)  # type: ignore[arg-type]
    batch = await harness.store.queue.lease(RUN, incarnation, name, amount, **more)  # type: ignore[arg-type]
    return [leased.group_id for leased in batch.groups]


async def test_lease_by_sequences_returns_the_exact_number(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    ids = await harness.fill(4)
    assert await lease(harness, incarnation, "b1", "sequences", 3) == [], "groups of 2 never make 3"
    assert await lease(harness, incarnation, "b1", "sequences", 4) == ids[:2]
    assert await lease(harness, incarnation, "b2", "sequences", 6) == []
    assert (await harness.whereabouts())["ready"] == ids[2:]


async def test_a_token_budget_is_filled_in_order(harness: StoreHarness) -> None:
    incarnation = await harness.start(groups=8)
    ids = await harness.send(*(("env-1", tokens, 0) for tokens in (10, 20, 50, 5, 5)))
    assert await lease(harness, incarnation, "b1", "tokens", 45) == ids[:2], (
        "50 do not fit, and no smaller group overtakes them"
    )
    assert await lease(harness, incarnation, "b2", "tokens", 20) == ids[2:3], "one group at least, whatever its size"
    assert await lease(harness, incarnation, "b3", "tokens", 11) == [], "there may be more to come"
    assert await lease(harness, incarnation, "b3", "tokens", 11, partial=True) == ids[3:]
    assert await lease(harness, incarnation, "b4", "tokens", 11, partial=True) == [], "nothing is not a batch"


async def test_stale_groups_are_dropped_with_a_reason_and_replaced(harness: StoreHarness) -> None:
    incarnation = await harness.start(staleness=3, groups=1)
    old, fresh = await harness.send(("env-1", 10, 0), ("env-1", 10, 1))
    await harness.store.runs.record_version(RUN, incarnation, 3)
    outstanding = await harness.ask("env-2", 9)
    assert len(outstanding) == 5
    batch = await harness.store.queue.lease(RUN, incarnation, "b1", LeaseSize("groups", 1), max_staleness=2)
    assert [group.group_id for group in batch.groups] == [fresh]
    assert (batch.stale, batch.dead) == (1, 0)
    status = await harness.store.runs.status(RUN)
    assert (status.dropped, status.accepted, status.bytes) == ({"stale": 1}, 1, 100)
    assert (await harness.store.runs.audit(RUN)).dropped == {old: "stale"}
    assert await harness.ask("env-2", 9) == ["g00000007"], "training needs a group instead of the dead one"


async def test_a_group_as_old_as_allowed_is_leased(harness: StoreHarness) -> None:
    incarnation = await harness.start(staleness=3, groups=1)
    (group,) = await harness.send(("env-1", 10, 0))
    await harness.store.runs.record_version(RUN, incarnation, 2)
    assert await lease(harness, incarnation, "b1", "groups", 1, max_staleness=2) == [group]


async def test_a_lease_before_the_first_version_is_empty(harness: StoreHarness) -> None:
    """No permit can be issued then, so the lease keeps no room for an environment with a share."""
    incarnation = (await harness.store.runs.take(RUN, trainer(), [])).incarnation
    await harness.store.envs.register(RUN, "env-1", None, 0.5)
    assert await harness.lease(incarnation, "b1", 4) is None


@pytest.mark.long
async def test_lease_searches_the_queue_up_to_a_bound(redis: Redis) -> None:
    """An environment that holds a share but sends nothing must not make each lease read a long queue completely. It
    must not delay a lease that finds enough groups."""
    harness = StoreHarness(Store(redis, Limits()), redis)
    await harness.create()
    incarnation = (await harness.store.runs.take(RUN, trainer(groups=6000), [])).incarnation
    await harness.store.runs.record_version(RUN, incarnation, 0)
    ids: list[str] = []
    for _ in range(4):
        ids += await harness.fill(1000)
    await harness.store.envs.register(RUN, "silent", None, 0.5)
    assert await harness.lease(incarnation, "b1", 8) is None
    await harness.redis.hset(PREFIX + "env:silent", "min_batch_allocation", "0.01")
    ids += await harness.fill(1000)
    await harness.redis.hset(PREFIX + "env:silent", "min_batch_allocation", "0.5")
    before = (await redis.info("commandstats"))["cmdstat_hmget"]["calls"]
    assert await harness.lease(incarnation, "b1", 8) == ids[:8]
    assert (await redis.info("commandstats"))["cmdstat_hmget"]["calls"] - before <= 4096 + 128
    assert await harness.lease(incarnation, "b2", 4200) is None, "half of them are to come"
    await harness.store.envs.unregister(RUN, "silent")
    assert await harness.lease(incarnation, "b2", 4200) == ids[8:4208], "a batch may be larger than the bound"


async def test_lease_by_sequences_combines_groups_of_any_sizes(harness: StoreHarness) -> None:
    """In order, 4 and 3 make 7, and a group of 1 never arrives."""
    incarnation = await harness.start(groups=16)
    await harness.redis.hset(PREFIX + "record", "group_size", 4)
    sizes = (4, 3, 4, 3, 3)
    ids = [(await harness.send(("env-1", 10, 0), sequences=size))[0] for size in sizes]
    assert await lease(harness, incarnation, "b1", "sequences", 8) == [ids[0], ids[2]]
    assert await lease(harness, incarnation, "b2", "sequences", 8) == []
    assert await lease(harness, incarnation, "b2", "sequences", 6) == [ids[1], ids[3]]
    assert await lease(harness, incarnation, "b3", "sequences", 4) == []


async def test_lease_does_not_search_for_a_sum_above_the_search_limit(harness: StoreHarness) -> None:
    """Sizes times sequences: up to 262,144. In order, the first group is in the way; above the limit, the largest."""
    incarnation = await harness.start(groups=16)
    await harness.redis.hset(PREFIX + "record", "group_size", 200_000)
    _, *large = [(await harness.send(("env-1", 10, 0), sequences=size))[0] for size in (3, 65_536, 65_536)]
    assert await lease(harness, incarnation, "b1", "sequences", 131_072) == large
    _, *large = [(await harness.send(("env-1", 10, 0), sequences=size))[0] for size in (3, 65_537, 65_537)]
    assert await lease(harness, incarnation, "b2", "sequences", 131_074) == large
    for size in (80_000, 65_537, 65_537):
        await harness.send(("env-1", 10, 0), sequences=size)
    assert await lease(harness, incarnation, "b3", "sequences", 131_074) == []


async def test_lease_with_look_off_leaves_the_queue_unchanged_until_enough_is_ready(harness: StoreHarness) -> None:
    incarnation = await harness.start(staleness=3, groups=2)
    await harness.fill(1)
    await harness.store.runs.record_version(RUN, incarnation, 3)
    for unit, count in (("groups", 2), ("sequences", 4)):
        assert await lease(harness, incarnation, "b1", unit, count, max_staleness=2, look=False) == []
    assert (await harness.store.runs.status(RUN)).dropped == {}
    (fresh,) = await harness.send(("env-1", 10, 3))
    assert await lease(harness, incarnation, "b1", "groups", 2, max_staleness=2, look=False) == []
    assert (await harness.store.runs.status(RUN)).dropped == {"stale": 1}, "there was enough to look at"
    assert await lease(harness, incarnation, "b1", "sequences", 2, look=False) == [fresh]
    (last,) = await harness.fill(1)
    assert await lease(harness, incarnation, "b2", "tokens", 10, look=False) == [last]


@pytest.mark.parametrize("unit", ["groups", "sequences", "tokens"])
async def test_retried_lease_returns_the_same_batch_for_any_requested_amount(harness: StoreHarness, unit: str) -> None:
    incarnation = await harness.start()
    ids = await harness.fill(4)
    assert await harness.lease(incarnation, "b1", 2) == ids[:2]
    assert await lease(harness, incarnation, "b1", unit, 1) == ids[:2]
    await harness.expire_lease("b1")
    assert await harness.lease(incarnation, "b2", 9) is None
    assert await lease(harness, incarnation, "b1", unit, 1) == ids[:2], (
        "the lease expired, and no trainer holds its groups"
    )


async def test_a_batch_may_be_larger_than_what_lua_unpacks_at_once(harness: StoreHarness) -> None:
    """The store reads 1024 groups at a time. A batch of one, two and a fraction of such chunks is whole, with each
    group once and in order."""
    incarnation = await harness.start(groups=2100)
    ids: list[str] = []
    while len(ids) < 2060:
        ids += await harness.fill(min(256, 2060 - len(ids)))
    assert await harness.lease(incarnation, "b1", 2050) == ids[:2050]
    assert (await harness.store.runs.audit(RUN)).leased == ids[:2050]
    assert await harness.lease(incarnation, "b2", 10) == ids[2050:]
    assert await harness.store.queue.nack(RUN, incarnation, ["b1"]) == 2050
    assert (await harness.store.runs.audit(RUN)).ready == ids[:2050]


async def test_ready_groups_are_counted_by_environment_and_size(harness: StoreHarness) -> None:
    """The counts that say which batches are possible, after every way into and out of the queue."""
    harness.store = Store(harness.redis, Limits(max_attempts=1))
    incarnation = await harness.start(groups=8)
    ids = await harness.send(*((env_id, 10, 0) for env_id in "xyxyxx"))

    async def agree() -> dict[str, int]:
        counted: Any = await harness.redis.hgetall(PREFIX + "kinds")
        found: Counter[str] = Counter()
        for group_id in (await harness.store.runs.audit(RUN)).ready:
            facts: Any = await harness.redis.hmget(PREFIX + f"group:{group_id}", "sequences", "env_id")
            found[" ".join(value.decode() for value in facts)] += 1
        assert {kind.decode(): int(count) for kind, count in counted.items()} == found
        return dict(found)

    assert await agree() == {"2 x": 4, "2 y": 2}
    await harness.lease(incarnation, "b1", 2)
    assert await agree() == {"2 x": 3, "2 y": 1}
    await harness.store.queue.nack(RUN, incarnation, ["b1"])
    assert await agree() == {"2 x": 4, "2 y": 2}
    assert await harness.lease(incarnation, "b2", 2) == ids[2:4], "the first two are dead now"
    assert await agree() == {"2 x": 2}
    await harness.expire_lease("b2")
    assert await harness.lease(incarnation, "b3", 1) == ids[4:5]
    assert await agree() == {"2 x": 1}
    await harness.store.dead_letters.replay(RUN, ids[:2])
    assert await agree() == {"2 x": 2, "2 y": 1}
    await harness.store.runs.take(RUN, trainer(groups=8), [ids[0]])
    assert await agree() == {"2 x": 2, "2 y": 1}
