"""Status and lease cost the same with a long queue as with a short queue, counted in Redis commands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import RUN, StoreHarness, submission

AT = f"/v1/runs/{RUN}"
SHORT, LONG = 10, 10_000


async def fill(harness: StoreHarness, count: int) -> None:
    """Submits `count` groups directly to the store, many at a time."""
    while count:
        ids = await harness.ask("env-1", min(count, 50))
        await asyncio.gather(*(harness.store.queue.submit(RUN, "env-1", submission(name, size=20)) for name in ids))
        count -= len(ids)


async def commands(redis: Redis, call: Callable[[], Awaitable[Any]]) -> int:
    """Returns the Redis commands that `call` takes, including those inside scripts. It takes the least of a few calls:
    on its first call the API connects and loads a script, and other users of this Redis can only add commands."""
    counts = []
    for _ in range(5):
        await redis.config_resetstat()
        await call()
        stats = await redis.info("commandstats")
        ours = ("cmdstat_config|resetstat", "cmdstat_info")
        counts.append(sum(int(stat["calls"]) for name, stat in stats.items() if name not in ours))
    return min(counts)


@pytest.mark.long
async def test_status_and_lease_need_equal_redis_commands_for_10_and_10_000_groups(
    harness: StoreHarness, http: httpx.AsyncClient
) -> None:
    incarnation = await harness.start(groups=2 * LONG)
    leased = iter(range(100))

    async def status() -> None:
        assert (await http.get(f"{AT}/status")).is_success

    async def lease() -> None:
        body = {"incarnation": incarnation, "batch_id": f"b{next(leased)}", "groups": 2}
        assert (await http.post(f"{AT}/lease", json=body)).status_code == 200

    await fill(harness, SHORT)
    short = await commands(harness.redis, status), await commands(harness.redis, lease)
    await fill(harness, LONG)
    ready = (await harness.store.runs.status(RUN)).ready
    assert ready == LONG, "the ten of before are leased"
    assert (await commands(harness.redis, status), await commands(harness.redis, lease)) == short
