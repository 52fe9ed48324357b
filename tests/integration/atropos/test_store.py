"""The store's guarantees to the root endpoints: receipts, buffers, leases of batches that are being sent, resets."""

from __future__ import annotations

import asyncio

from tests.integration.atropos.bench import RUN, Bench, scored
from tests.support.redis_contents import key_names


async def expire(bench: Bench, batch_id: str) -> None:
    """Expires the batch's lease, as if the API that sends the batch had died half a minute ago."""
    assert await bench.redis.zadd(f"gm:{{{RUN}}}:leases", {batch_id: 1}, xx=True, ch=True) == 1


async def test_a_submit_that_is_repeated_because_its_answer_got_lost_stores_once(bench: Bench) -> None:
    await bench.register(8)
    env = await bench.env(4)
    for size, said in ((4, None), (3, 3), (1, 0)):
        group = scored(size, size, env)
        for _ in range(3):
            assert await bench.queue.submit(f"receipt:{size}", [group]) == [said]
    assert (await bench.store.runs.status(RUN)).sequences["ready"] == 8
    assert await bench.draw() == [4, 3, 1]


async def test_a_list_is_stored_whole_or_not_at_all(bench: Bench) -> None:
    await bench.register(8)
    groups = [scored(number, 4, None) for number in range(3)]
    assert await bench.queue.submit("r", groups) == [None, None, None]
    assert await bench.queue.submit("r", groups) == [None, None, None]
    assert await bench.queue.submit("none", []) == []
    assert await bench.draw_all() == [[0, 1]]


async def test_groups_are_stamped_with_the_version_of_their_receipt(bench: Bench) -> None:
    await bench.register(8)
    env = await bench.env(4)
    await bench.submit(2, env)
    record = await bench.store.runs.take(RUN, {"batch_size": 8, "gradient_accumulation_steps": 1, "training_steps": 9,
                                          "max_staleness": 1}, [])  # fmt: skip
    await bench.store.runs.record_version(RUN, record.incarnation, 7)
    await bench.submit(4, env)
    await bench.submit(2, env)
    stamps = [await bench.redis.hmget(f"gm:{{{RUN}}}:group:{name}", "version", "step")
              for name in ("a00000001", "a00000000", "a00000002")]  # fmt: skip
    assert stamps == [[b"1.7", b"7"], [b"0.0", b""], [b"1.7", b"7"]]


async def test_a_batch_whose_sender_died_comes_again_in_its_place(bench: Bench) -> None:
    await bench.register(8)
    for _ in range(6):
        await bench.submit(4)
    lent = await bench.lend()
    assert lent is not None
    await expire(bench, lent[0])
    assert await bench.draw_all() == [[0, 1], [2, 3], [4, 5]]
    assert await bench.step() == 3
    assert not await bench.queue.ack(lent[0]), "its groups went out with another batch"
    assert await bench.step() == 3


async def test_a_late_ack_counts_while_nobody_has_the_groups(bench: Bench) -> None:
    await bench.register(8)
    await bench.submit(8)
    lent = await bench.lend()
    assert lent is not None
    await expire(bench, lent[0])
    await bench.submit(4)
    assert await bench.queue.ack(lent[0])
    assert await bench.queue.ack(lent[0]), "a repeated ack"
    assert await bench.step() == 1
    assert await bench.draw() is None


async def test_a_lend_that_is_repeated_because_its_answer_got_lost_is_the_same_batch(bench: Bench) -> None:
    await bench.register(8)
    for _ in range(4):
        await bench.submit(4)
    first = await bench.lend("atropos:b")
    assert first == await bench.lend("atropos:b") == ("atropos:b", [0, 1])
    await expire(bench, "atropos:b")
    assert await bench.lend("atropos:c") == ("atropos:c", [0, 1])
    assert not await bench.queue.extend("atropos:b")
    assert await bench.queue.extend("atropos:c")
    await bench.queue.nack("atropos:c")
    assert not await bench.queue.extend("atropos:c")
    assert await bench.lend("atropos:c") == ("atropos:c", [0, 1])


async def test_an_expired_batch_that_is_asked_for_again_lives_again(bench: Bench) -> None:
    await bench.register(8)
    await bench.submit(8)
    assert await bench.lend("atropos:b") == ("atropos:b", [0])
    await expire(bench, "atropos:b")
    assert await bench.draw() is not None  # reaped, and leased again
    await bench.submit(8)
    assert await bench.lend("atropos:d") == ("atropos:d", [1])
    await expire(bench, "atropos:d")
    await bench.submit(4)
    await bench.lend("atropos:e")  # reaps, and finds the group of d again
    assert (await bench.store.runs.status(RUN)).lease_expiries == 2


async def test_several_who_draw_at_once_get_different_batches(bench: Bench) -> None:
    await bench.register(8)
    for _ in range(12):
        await bench.submit(8)
    drawn = await asyncio.gather(*[bench.draw() for _ in range(12)])
    assert sorted(number for batch in drawn for number in batch or ()) == list(range(12))


async def test_a_reset_drops_the_queue_and_the_buffers_and_what_is_on_its_way(bench: Bench) -> None:
    await bench.register(8)
    env = await bench.env(4)
    await bench.submit(3, env)
    await bench.fill(600, 4)  # more than one call of the script drops
    lent = await bench.lend()
    assert lent is not None
    await bench.queue.reset()
    assert await bench.queue.trainer() is None
    assert await bench.queue.env(env) is None
    await bench.register(8)
    assert not await bench.queue.ack(lent[0]), "a batch from before the reset does not count as a step after it"
    assert await bench.step() == 0
    status = await bench.store.runs.status(RUN)
    assert (status.ready, status.leased, status.bytes) == (0, 0, 0)
    assert status.dropped == {"reset": 600}
    assert await bench.redis.get("gm:bytes") == b"0"


async def test_a_reset_leaves_what_comes_after_it(bench: Bench) -> None:
    await bench.register(8)
    await bench.fill(300, 4)
    prefix = f"gm:{{{RUN}}}:"
    _, last, left = await bench.store.scripts.run("atropos_reset", prefix, "", 256)
    assert left == 44
    await bench.submit(4)
    await bench.store.scripts.run("atropos_reset", prefix, last, 256)
    await bench.register(8)
    await bench.submit(4)
    assert await bench.draw_all() == [[300, 301]]


async def test_deleting_the_run_leaves_nothing_in_redis(bench: Bench) -> None:
    await bench.register(8)
    env = await bench.env(4, share=0.25)
    for size in (3, 4, 8):
        await bench.submit(size, env)
    await bench.queue.disconnect(env)
    assert await bench.lend() is not None
    await bench.store.runs.close(RUN)
    await bench.store.runs.delete(RUN)
    assert {name for name in await key_names(bench.redis) if ":receipt:" not in name} == {
        "gm:bytes",
        f"gm:{{{RUN}}}:fence",
    }
    assert await bench.redis.get("gm:bytes") == b"0"
