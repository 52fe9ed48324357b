"""The store's guarantees to the root endpoints: receipts, buffers, leases of batches that are being sent, resets."""

from __future__ import annotations

import asyncio

from tests.integration.atropos.store_harness import RUN, StoreHarness, scored
from tests.support.redis_contents import key_names

from gristmill import TrajectoryGroup


async def expire(harness: StoreHarness, batch_id: str) -> None:
    """Expires the batch's lease, as if the API that sends the batch had died half a minute ago."""
    assert await harness.redis.zadd(f"gm:{{{RUN}}}:leases", {batch_id: 1}, xx=True, ch=True) == 1


async def test_repeated_submit_with_the_same_receipt_stores_once(harness: StoreHarness) -> None:
    await harness.register(8)
    env = await harness.env(4)
    for size, said in ((4, None), (3, 3), (1, 0)):
        group = scored(size, size, env)
        for _ in range(3):
            assert await harness.queue.submit(f"receipt:{size}", [group]) == [said]
    assert (await harness.store.runs.status(RUN)).sequences["ready"] == 8
    assert await harness.draw() == [4, 3, 1]


async def test_repeated_list_with_the_same_receipt_is_stored_once(harness: StoreHarness) -> None:
    await harness.register(8)
    groups = [scored(number, 4, None) for number in range(3)]
    assert await harness.queue.submit("r", groups) == [None, None, None]
    assert await harness.queue.submit("r", groups) == [None, None, None]
    assert await harness.queue.submit("none", []) == []
    assert await harness.draw_all() == [[0, 1]]


async def test_groups_are_stamped_with_the_version_of_their_receipt(harness: StoreHarness) -> None:
    await harness.register(8)
    env = await harness.env(4)
    await harness.submit(2, env)
    record = await harness.store.runs.take(RUN, {"batch_size": 8, "gradient_accumulation_steps": 1, "training_steps": 9,
                                          "max_staleness": 1}, [])  # fmt: skip
    await harness.store.runs.record_version(RUN, record.incarnation, 7)
    await harness.submit(4, env)
    await harness.submit(2, env)
    names = ("a00000001", "a00000000", "a00000002")
    steps = [await harness.redis.hget(f"gm:{{{RUN}}}:group:{name}", "step") for name in names]
    assert steps == [b"7", b"", b"7"]
    groups = [TrajectoryGroup.decode(await harness.store.queue.payload(RUN, name) or b"") for name in names]
    assert [str(group.oldest_version) for group in groups] == ["1.7", "0.0", "1.7"]
    assert [(group.group_id, group.row) for group in groups] == list(zip(names, (1, 0, 2), strict=True))


async def test_expired_batch_is_delivered_again_in_its_place(harness: StoreHarness) -> None:
    await harness.register(8)
    for _ in range(6):
        await harness.submit(4)
    lent = await harness.lend()
    assert lent is not None
    await expire(harness, lent[0])
    assert await harness.draw_all() == [[0, 1], [2, 3], [4, 5]]
    assert await harness.step() == 3
    assert not await harness.queue.ack(lent[0]), "its groups went out with another batch"
    assert await harness.step() == 3


async def test_late_ack_counts_if_the_groups_were_not_lent_again(harness: StoreHarness) -> None:
    await harness.register(8)
    await harness.submit(8)
    lent = await harness.lend()
    assert lent is not None
    await expire(harness, lent[0])
    await harness.submit(4)
    assert await harness.queue.ack(lent[0])
    assert await harness.queue.ack(lent[0]), "a repeated ack"
    assert await harness.step() == 1
    assert await harness.draw() is None


async def test_repeated_lend_with_the_same_name_returns_the_same_batch(harness: StoreHarness) -> None:
    await harness.register(8)
    for _ in range(4):
        await harness.submit(4)
    first = await harness.lend("atropos:b")
    assert first == await harness.lend("atropos:b") == ("atropos:b", [0, 1])
    await expire(harness, "atropos:b")
    assert await harness.lend("atropos:c") == ("atropos:c", [0, 1])
    assert not await harness.queue.extend("atropos:b")
    assert await harness.queue.extend("atropos:c")
    await harness.queue.nack("atropos:c")
    assert not await harness.queue.extend("atropos:c")
    assert await harness.lend("atropos:c") == ("atropos:c", [0, 1])


async def test_later_lends_find_and_count_expired_batches(harness: StoreHarness) -> None:
    await harness.register(8)
    await harness.submit(8)
    assert await harness.lend("atropos:b") == ("atropos:b", [0])
    await expire(harness, "atropos:b")
    assert await harness.draw() is not None  # reaped, and leased again
    await harness.submit(8)
    assert await harness.lend("atropos:d") == ("atropos:d", [1])
    await expire(harness, "atropos:d")
    await harness.submit(4)
    await harness.lend("atropos:e")  # reaps, and finds the group of d again
    assert (await harness.store.runs.status(RUN)).lease_expiries == 2


async def test_concurrent_draws_get_different_batches(harness: StoreHarness) -> None:
    await harness.register(8)
    for _ in range(12):
        await harness.submit(8)
    drawn = await asyncio.gather(*[harness.draw() for _ in range(12)])
    assert sorted(number for batch in drawn for number in batch or ()) == list(range(12))


async def test_reset_drops_the_queue_the_buffers_and_lent_batches(harness: StoreHarness) -> None:
    await harness.register(8)
    env = await harness.env(4)
    await harness.submit(3, env)
    await harness.fill(600, 4)  # more than one call of the script drops
    lent = await harness.lend()
    assert lent is not None
    await harness.queue.reset()
    assert await harness.queue.trainer() is None
    assert await harness.queue.env(env) is None
    await harness.register(8)
    assert not await harness.queue.ack(lent[0]), "a batch from before the reset does not count as a step after it"
    assert await harness.step() == 0
    status = await harness.store.runs.status(RUN)
    assert (status.ready, status.leased, status.bytes) == (0, 0, 0)
    assert status.dropped == {"reset": 600}
    assert await harness.redis.get("gm:bytes") == b"0"


async def test_reset_keeps_groups_that_arrive_during_it(harness: StoreHarness) -> None:
    await harness.register(8)
    await harness.fill(300, 4)
    prefix = f"gm:{{{RUN}}}:"
    _, last, left = await harness.store.scripts.run("atropos_reset", prefix, "", 256)
    assert left == 44
    await harness.submit(4)
    await harness.store.scripts.run("atropos_reset", prefix, last, 256)
    await harness.register(8)
    await harness.submit(4)
    assert await harness.draw_all() == [[300, 301]]


async def test_deleting_the_run_leaves_nothing_in_redis(harness: StoreHarness) -> None:
    await harness.register(8)
    env = await harness.env(4, share=0.25)
    for size in (3, 4, 8):
        await harness.submit(size, env)
    await harness.queue.disconnect(env)
    assert await harness.lend() is not None
    await harness.store.runs.close(RUN)
    await harness.store.runs.delete(RUN)
    assert {name for name in await key_names(harness.redis) if ":receipt:" not in name} == {
        "gm:bytes",
        f"gm:{{{RUN}}}:fence",
    }
    assert await harness.redis.get("gm:bytes") == b"0"
