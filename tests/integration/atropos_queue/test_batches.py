"""Batches of Atropos' protocol: selection, leases, groups that can be in no batch, acks and rejections."""

from __future__ import annotations

import asyncio
import time

import pytest
from redis.asyncio import Redis
from tests.integration.api.event_listener import NOTHING, EventListener, Recorded
from tests.integration.atropos_queue.store_harness import (
    RUN,
    START,
    StoreHarness,
    event_fields,
    names,
    scored,
)

from gristmill_api.settings import Limits


async def test_status_has_the_largest_ready_group_and_whether_the_run_is_finished(harness: StoreHarness) -> None:
    await harness.start(batch_size=64)
    first, second = await harness.env(group_size=2), await harness.env(group_size=4)
    await harness.submit(scored(6, first), scored(8, first), scored(8, None), scored(16, second))
    view = await harness.queue.env(first)
    assert view is not None
    assert (view.group_size, view.finished) == (8, False)
    assert sorted(view.ready) == [("", 8, 1), ("0", 6, 1), ("0", 8, 1), ("1", 16, 1)]
    assert [await harness.redis.hget(f"{START}env:{number}", "group_size") for number in (0, 1)] == [b"2", b"4"]
    assert await harness.submit(scored(2, first)) == [None], "no buffer waits for the sum that the status has"
    await harness.store.runs.close(RUN)
    await harness.redis.delete(START + "kinds")
    view = await harness.queue.env(first)
    assert view is not None
    assert (view.group_size, view.finished) == (8, True), "it stays the largest"


async def test_ack_of_a_lent_batch_begins_the_next_step(harness: StoreHarness, listener: EventListener) -> None:
    await harness.start()
    await harness.submit(*[scored()] * 4)
    await listener.recorded()
    assert await listener.recorded(harness.lend("atropos:1")) == (
        set(),
        [event_fields("lease", batch="atropos:1", groups=2)],
    )
    answer = await harness.queue.lease("atropos:1")
    assert answer is not None
    assert [(group.group_id, group.size) for group in answer.groups] == [(name, 100) for name in names(0, 1)]
    assert answer.dead == 0
    assert await harness.ready() == names(2, 3)
    assert await harness.redis.hget(START + "group:a00000000", "attempts") == b"1"
    assert await listener.recorded() == NOTHING, "a retry"
    acked: Recorded = (set(), [event_fields("ack", batch="atropos:1", groups=2)])
    assert await listener.recorded(harness.queue.ack("atropos:1")) == acked
    assert await harness.queue.ack("atropos:1")
    assert await listener.recorded() == NOTHING
    trainer = await harness.queue.trainer()
    assert trainer is not None
    assert trainer.step == 1, "once, however often it is reported"
    assert not await harness.queue.ack("atropos:never")
    audit = await harness.store.runs.audit(RUN)
    assert (audit.trained, audit.ready, audit.leased) == (names(0, 1), names(2, 3), [])
    assert await harness.redis.exists(START + "batch:atropos:1") == 0
    assert await harness.redis.zcard(START + "leases") == 0
    assert await harness.redis.hgetall(START + "atropos") != {}


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ((7, 29_000, 5, 31_000, 3), names(1, 3)),
        ((7, 29_000, 5, 31_000, 40_000), None),
        ((20_000, 40_000, 50_000, 5, 3), names(0, 1)),
    ],
    ids=["the largest first sum", "they miss the sum", "the oldest sum, and the largest first do not"],
)
async def test_batch_of_many_large_sizes_takes_the_largest_groups_first(
    harness: StoreHarness, sizes: tuple[int, ...], batch: list[str] | None
) -> None:
    """Five times 60,000 sums are more than a script may try while all other calls wait."""
    await harness.start(batch_size=60_000)
    await harness.submit(*map(scored, sizes))
    assert await harness.lend("atropos:1") == batch
    assert len(await harness.ready()) == 5 - len(batch or ())


async def test_sums_of_a_batch_are_tried_up_to_their_limit(harness: StoreHarness) -> None:
    await harness.start(65_536)  # Four times as many sums are the limit.
    await harness.submit(*(scored(size) for size in (40_000, 33_000, 36_000, 32_536)))
    assert await harness.lend("atropos:1") == names(1, 3), "the largest groups first would find none"


async def test_batch_lease_expires_and_can_be_extended(harness: StoreHarness) -> None:
    await harness.start()
    await harness.submit(*[scored()] * 4)
    before = time.time()
    await harness.lend("atropos:1")
    await harness.lend("atropos:2")

    async def deadline(batch_id: str) -> float:
        return float(await harness.redis.zscore(START + "leases", batch_id) or 0) / 1000

    for batch_id in ("atropos:1", "atropos:2"):
        assert before + 29.9 < await deadline(batch_id) < time.time() + 30.1
    await harness.expire_lease("atropos:1")
    assert await harness.queue.extend("atropos:1"), "its expiry was not seen yet"
    assert before + 29.9 < await deadline("atropos:1") < time.time() + 30.1
    assert not await harness.queue.extend("atropos:9")
    assert await harness.redis.zcard(START + "leases") == 2
    await harness.expire_lease("atropos:1")
    assert await harness.lend("atropos:3") == names(0, 1)
    assert not await harness.queue.extend("atropos:1")
    assert not await harness.queue.ack("atropos:1"), "its groups moved on"
    await harness.expire_lease("atropos:2")
    assert await harness.lend("atropos:4") == names(2, 3)
    await harness.expire_lease("atropos:4")
    await harness.expire_lease("atropos:3")
    await harness.submit(scored(1))
    await harness.redis.hset(START + "atropos", "batch_size", 999)
    assert await harness.lend("atropos:5") is None
    assert await harness.ready() == names(0, 1, 2, 3, 4)
    assert await harness.lend("atropos:4") == names(2, 3), "expired, and no trainer holds its groups"
    assert before + 29.9 < await deadline("atropos:4") < time.time() + 30.1
    assert await harness.queue.ack("atropos:3"), "late, and no trainer holds its groups"
    assert await harness.redis.smembers(START + "expired") == set()
    assert (await harness.store.runs.audit(RUN)).trained == names(0, 1)
    status = await harness.store.runs.status(RUN)
    assert (status.leased, status.lease_expiries) == (2, 4)


async def test_concurrent_leases_get_different_batches(harness: StoreHarness) -> None:
    await harness.start()
    await harness.submit(*[scored(4)] * 12)
    batches = await asyncio.gather(*(harness.lend(f"atropos:{number}") for number in range(12)))
    assert sorted(name for batch in batches for name in batch or ()) == names(*range(12))


async def test_nack_returns_the_batch_of_a_disconnected_client(harness: StoreHarness, listener: EventListener) -> None:
    await harness.start()
    await harness.submit(*[scored()] * 3)
    await harness.lend("atropos:1")
    await listener.recorded()
    given_back = ({f"ready {START}"}, [event_fields("nack", batch="atropos:1", groups=2)])
    assert await listener.recorded(harness.queue.nack("atropos:1")) == given_back
    assert await listener.recorded(harness.queue.nack("atropos:1")) == NOTHING
    assert not await harness.queue.extend("atropos:1")
    assert await harness.ready() == names(0, 1, 2)
    assert not await harness.queue.ack("atropos:1")
    assert await harness.redis.exists(START + "batch:atropos:1") == 0
    assert await harness.lend("atropos:1") == names(0, 1), "the name is free again"


async def test_group_that_fits_no_batch_is_not_the_part_of_its_environment(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as client:
        harness = StoreHarness(client)
        await harness.start()
        await harness.env(share=0.5)
        await harness.submit(scored(2, None), scored(2, None), scored(9, 0))
        answer = await harness.queue.lease("atropos:1")
        assert answer is not None
        assert (answer.groups, answer.dead) == ([], 1), "the batch waits for a group of the environment"
        await harness.submit(scored(2, 0))
        assert await harness.lend("atropos:2") == names(0, 3)


async def test_groups_that_fit_no_batch_become_dead_letters(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as client:
        harness = StoreHarness(client, Limits(max_attempts=2))
        await harness.start()
        await harness.submit(scored(5), scored(2), scored(4), scored(9), scored(2))
        answer = await harness.queue.lease("atropos:1")
        assert answer is not None
        leased = [group.group_id for group in answer.groups]
        assert (leased, answer.dead) == (names(1, 4), 2)
        letters = await harness.store.dead_letters.all(RUN, 0, 9)
        assert [(letter.group_id, letter.reason) for letter in letters] == [
            (name, "larger_than_a_batch") for name in names(0, 3)
        ]
        await harness.queue.nack("atropos:1")
        assert await harness.lend("atropos:2") == names(1, 4)
        await harness.queue.nack("atropos:2")
        assert await harness.lend("atropos:3") == names(2), "the group before it was delivered too often"
        status = await harness.store.runs.status(RUN)
        assert (status.dead, status.accepted, status.ready) == (3, 2, 1)
        reasons = {letter.group_id: letter.reason for letter in await harness.store.dead_letters.all(RUN, 0, 9)}
        assert reasons["a00000001"] == "undeliverable"


async def test_lease_returns_no_batch_if_all_its_groups_became_dead_letters(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as client:
        harness = StoreHarness(client, Limits(max_attempts=1))
        await harness.start()
        await harness.submit(scored(), scored(), scored())
        assert await harness.lend("atropos:1") == names(0, 1)
        await harness.queue.nack("atropos:1")
        answer = await harness.queue.lease("atropos:2")
        assert answer is not None
        assert (answer.groups, answer.dead) == ([], 2)
        status = await harness.store.runs.status(RUN)
        assert (status.dead, status.leased, status.ready) == (2, 0, 1)
        assert await harness.redis.hlen(START + "leased") == 0


async def test_extend_revives_an_expired_batch_whose_groups_are_ready(harness: StoreHarness) -> None:
    await harness.start()
    await harness.submit(*[scored()] * 2)
    assert await harness.lend("atropos:1") == names(0, 1)
    await harness.expire_lease("atropos:1")
    await harness.redis.hset(START + "atropos", "batch_size", 999)
    assert await harness.lend("atropos:2") is None
    assert await harness.ready() == names(0, 1)
    assert await harness.queue.extend("atropos:1")
    assert await harness.ready() == []
    await harness.redis.hset(START + "atropos", "batch_size", 4)
    assert await harness.lend("atropos:3") is None, "its groups are still being sent"
    assert await harness.queue.ack("atropos:1")
    assert (await harness.store.runs.audit(RUN)).trained == names(0, 1)


async def test_share_of_a_silent_environment_is_not_reserved(harness: StoreHarness) -> None:
    await harness.start()
    quiet, busy = await harness.env(share=0.5), await harness.env()
    await harness.submit(*[scored(2, busy)] * 2)
    assert await harness.lend("atropos:1") is None
    await harness.silence(quiet)
    assert await harness.lend("atropos:1") == names(0, 1)
    await harness.submit(*[scored(2, busy)] * 2)
    assert await harness.queue.env(quiet) is not None
    assert await harness.lend("atropos:2") is None, "a request counts as a sign of life"


@pytest.mark.parametrize("batch_size", [0, -4])
async def test_lease_with_a_batch_size_of_zero_or_less_returns_nothing(harness: StoreHarness, batch_size: int) -> None:
    await harness.start(batch_size)
    await harness.submit(scored())
    assert await harness.lend("atropos:1") is None


async def test_acked_batches_are_archived_and_their_names_trimmed(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as client:
        harness = StoreHarness(client, archive=True)
        await harness.start()
        await harness.submit(*[scored()] * 2)
        await client.zadd(START + "acked", {f"old{number}": number for number in range(5000)})
        listener = EventListener(client, RUN)
        await listener.open()
        await harness.lend("atropos:1")
        await listener.recorded()
        topics, _ = await listener.recorded(harness.queue.ack("atropos:1"))
        assert topics == {f"archive {START}"}
        await listener.close()
        assert await harness.store.archive.head(RUN, 9) == names(0, 1)
        assert await client.zcard(START + "acked") == 4096
        assert await harness.queue.ack("atropos:1")


async def test_a_group_too_large_for_any_batch_is_found_behind_a_long_queue(harness: StoreHarness) -> None:
    await harness.start(batch_size=4)
    await harness.submit(*[scored(3)] * 100, scored(9))
    answer = await harness.queue.lease("atropos:1")
    assert answer is not None
    leased = [group.group_id for group in answer.groups]
    assert (leased, answer.dead) == ([], 1)
