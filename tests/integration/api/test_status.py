"""The contents of a run's status."""

from __future__ import annotations

import time

from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness


async def test_status_reports_age_and_staleness_of_the_oldest_ready_group(harness: StoreHarness) -> None:
    assert (await harness.store.runs.status(RUN)).version is None
    incarnation = await harness.start(staleness=3)
    status = await harness.store.runs.status(RUN)
    assert (status.oldest_ready_s, status.oldest_ready_staleness, status.envs) == (None, None, 0)
    await harness.store.runs.record_version(RUN, incarnation, 2)
    for row, step in enumerate((1, 0, 2)):
        (group_id,) = await harness.ask("env-1", 1)
        assert group_id == f"g{row:08d}"
        await harness.submit("env-1", group_id, step=step)
    await harness.store.runs.record_version(RUN, incarnation, 3)
    await harness.redis.hset(PREFIX + "group:g00000000", "at", int(time.time() * 1000) - 100_000)
    await harness.redis.hset(PREFIX + "group:g00000001", "at", int(time.time() * 1000) - 200_000)
    await harness.store.envs.register(RUN, "here", None)
    await harness.store.envs.register(RUN, "gone", None)
    await harness.redis.zadd(PREFIX + "envs", {"gone": 1})
    status = await harness.store.runs.status(RUN)
    assert status.oldest_ready_s is not None
    assert 99 < status.oldest_ready_s < 199
    assert (status.oldest_ready_staleness, status.envs, status.version) == (2, 1, f"{incarnation}.3")


async def test_status_reports_seconds_since_the_last_permit_request_and_submit(harness: StoreHarness) -> None:
    await harness.start()
    status = await harness.store.runs.status(RUN)
    assert (status.last_asked_s, status.last_submit_s) == (None, None)
    (group_id,) = await harness.ask("env-1", 1)
    await harness.submit("env-1", group_id)
    await harness.redis.hincrby(PREFIX + "counters", "asked_ms", -60_000)
    await harness.redis.hincrby(PREFIX + "counters", "submitted_ms", -90_000)
    status = await harness.store.runs.status(RUN)
    assert status.last_asked_s is not None
    assert status.last_submit_s is not None
    assert 60 <= status.last_asked_s < 90 <= status.last_submit_s < 120
    await harness.ask("env-1", 1)
    status = await harness.store.runs.status(RUN)
    assert status.last_asked_s is not None
    assert status.last_asked_s < 60


async def test_status_reports_seconds_since_the_last_registration(harness: StoreHarness) -> None:
    await harness.start()
    assert (await harness.store.runs.status(RUN)).last_registered_s is None
    await harness.store.envs.register(RUN, "here", None)
    await harness.redis.hincrby(PREFIX + "counters", "registered_ms", -60_000)
    assert 60 <= ((await harness.store.runs.status(RUN)).last_registered_s or 0) < 90
    await harness.store.envs.register(RUN, "here", None)  # started again
    again = (await harness.store.runs.status(RUN)).last_registered_s
    assert again is not None
    assert again < 60


async def test_status_counts_follow_a_batch_that_is_revived(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    await harness.fill(3)
    await harness.lease(incarnation, "b1", 2)

    async def counts() -> tuple[dict[str, int], dict[str, int]]:
        status = await harness.store.runs.status(RUN)
        return status.sequences, status.bytes_by_state

    held = {"ready": 2, "leased": 4, "dead": 0}, {"ready": 100, "leased": 200, "dead": 0}
    back = {"ready": 6, "leased": 0, "dead": 0}, {"ready": 300, "leased": 0, "dead": 0}
    assert await counts() == held
    for number in range(2):
        await harness.expire_lease("b1")
        assert await harness.lease(incarnation, "b2", 9) is None
        assert await counts() == back
        if number:
            await harness.store.queue.extend(RUN, incarnation, ["b1"])
        else:
            await harness.lease(incarnation, "b1", 2)
        assert await counts() == held
    assert await harness.redis.zscore(PREFIX + "leases", "b1") is not None
    assert await harness.redis.scard(PREFIX + "expired") == 0
