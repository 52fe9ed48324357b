"""Leases by groups: which groups make a batch. tests/integration/atropos_queue tests the leases by sequences."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, trainer

from gristmill_api.settings import Limits
from gristmill_api.store import Store


async def test_an_empty_queue_and_a_run_without_a_version_give_no_batch(harness: StoreHarness) -> None:
    incarnation = (await harness.store.runs.take(RUN, trainer(), [])).incarnation
    assert await harness.lease(incarnation, "b1", 1) is None
    await harness.store.runs.record_version(RUN, incarnation, 0)
    assert await harness.lease(incarnation, "b1", 1) is None


async def test_retried_lease_returns_the_same_batch_for_any_requested_amount(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    ids = await harness.fill(4)
    assert await harness.lease(incarnation, "b1", 2) == ids[:2]
    assert await harness.lease(incarnation, "b1", 1) == ids[:2]
    await harness.expire_lease("b1")
    assert await harness.lease(incarnation, "b2", 9) is None
    assert await harness.lease(incarnation, "b1", 3) == ids[:2], "the lease expired, and no trainer holds its groups"


@pytest.mark.long
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
