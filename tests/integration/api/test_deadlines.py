"""Leases, permits and registrations last until their deadline, by Redis' clock."""

from __future__ import annotations

import asyncio
import time

from redis.asyncio import Redis
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness

from gristmill_api.settings import Limits
from gristmill_api.store import Store


async def test_deadlines_use_redis_clock_in_milliseconds(harness: StoreHarness) -> None:
    harness.store = Store(harness.redis, Limits(permit_ttl_s=1000, lease_ttl_s=2000, env_ttl_s=3000))
    before = time.time()
    incarnation = await harness.start()
    await harness.store.envs.register(RUN, "env-1", None)
    _, b, _ = await harness.fill(3)
    await harness.lease(incarnation, "b1", 1)
    (permit,) = await harness.ask("env-1", 1)
    after = time.time()

    async def deadline(key: str, member: str) -> float:
        score = await harness.redis.zscore(PREFIX + key, member)
        assert score is not None
        return float(score) / 1000

    slack = 0.01
    assert before + 2000 - slack <= await deadline("leases", "b1") <= after + 2000 + slack
    assert before + 3000 - slack <= await deadline("envs", "env-1") <= after + 3000 + slack
    at = int(await harness.redis.hget(PREFIX + f"group:{b}", "at") or 0) / 1000
    assert before - slack <= at <= after + slack
    assert (await harness.store.runs.record(RUN)).created_at <= after + slack
    assert before + 1000 - slack <= await deadline("permits", permit) <= after + 1000 + slack
    await harness.store.queue.extend(RUN, incarnation, ["b1"])
    await harness.store.permits.renew(RUN, "env-1", [permit])
    assert before + 2000 - slack <= await deadline("leases", "b1") <= time.time() + 2000 + slack
    assert before + 1000 - slack <= await deadline("permits", permit) <= time.time() + 1000 + slack


async def test_lease_permit_and_environment_expire_at_their_deadline(redis: Redis) -> None:
    """A lease, a permit and an environment are valid until their deadline, and no longer valid at the deadline."""
    short = StoreHarness(Store(redis, Limits(lease_ttl_s=0.001, permit_ttl_s=0.001, env_ttl_s=0.001)), redis)
    lasting = StoreHarness(Store(redis, Limits()), redis)
    await short.create()
    incarnation = await short.start()
    await lasting.store.envs.register(RUN, "env-2", 1.0)
    await short.store.envs.register(RUN, "env-1", 99.0)
    await asyncio.sleep(0.01)  # As long as env-1 is alive, env-2 may hold one permit.
    first = await short.ask("env-2", 2)
    assert len(first) == 2, "the weight of an environment that is dead does not count"
    await asyncio.sleep(0.01)
    assert await lasting.ask("env-3", 2) == first, "they went to another"
    for group_id in first:
        await lasting.submit("env-3", group_id)
    assert await short.lease(incarnation, "b1", 2) == first
    await asyncio.sleep(0.01)
    assert await lasting.lease(incarnation, "b2", 2) == first
    assert (await lasting.store.runs.status(RUN)).lease_expiries == 1
