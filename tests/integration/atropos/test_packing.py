"""Which groups make a batch. test_conversation.py and test_packing_beside_the_reference.py compare our batches with
the batches of atroposlib's own server. This file tests our additions to atroposlib's rule, and their cost."""

from __future__ import annotations

import random

import pytest
from tests.integration.atropos.bench import RUN, Bench


async def test_batches_come_in_the_order_of_their_groups(bench: Bench) -> None:
    await bench.register(8)
    for _ in range(12):
        await bench.submit(4)
    assert await bench.draw_all() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


async def test_a_group_larger_than_a_batch_is_a_dead_letter_and_blocks_nobody(bench: Bench) -> None:
    await bench.register(8)
    for size in (9, 8, 100, 8):
        await bench.submit(size)
    assert await bench.draw_all() == [[1], [3]]
    assert await bench.reasons() == ["larger_than_a_batch", "larger_than_a_batch"]


async def test_the_oldest_of_odd_sizes_go_first(bench: Bench) -> None:
    await bench.register(10)
    for size in (3, 4, 7, 3, 3):
        await bench.submit(size)
    assert await bench.draw() == [0, 1, 3]
    assert await bench.draw() == [2, 4]


async def test_whole_packs_are_waited_for_while_nothing_is_stuck(bench: Bench) -> None:
    """A group of 4 and two groups of 2 would make a batch of 8 with groups of 1, 1 and 2. But all sizes divide 4, so
    packs will complete."""
    await bench.register(8)
    for size in (4, 2, 1, 1):
        await bench.submit(size)
    assert await bench.draw() is None
    await bench.submit(2)
    assert await bench.draw() == [0, 1, 4]


async def test_shares_of_environments_that_live_are_kept_and_of_the_dead_not(bench: Bench) -> None:
    await bench.register(8)
    first, second = await bench.env(4, share=0.5), await bench.env(4)
    for _ in range(4):
        await bench.submit(4, second)
    assert await bench.draw() is None
    await bench.submit(4, first)
    assert await bench.draw() == [4, 0]
    assert await bench.draw() is None
    await bench.silence(first)
    assert await bench.draw() == [1, 2]
    assert await bench.queue.env(first) is not None  # this request counts as a heartbeat
    await bench.submit(4, second)
    assert await bench.draw() is None


async def test_a_share_of_odd_sizes_is_kept(bench: Bench) -> None:
    await bench.register(10)
    first, second = await bench.env(3, share=0.3), await bench.env(7)
    await bench.submit(7, second)
    await bench.submit(3, second)
    assert await bench.draw() is None
    await bench.submit(3, first)
    assert await bench.draw() == [2, 0]


async def test_a_share_that_is_no_whole_number_is_rounded_down(bench: Bench) -> None:
    await bench.register(10)
    first, second = await bench.env(2, share=0.25), await bench.env(2)
    for env in (second, second, second, second, second, first, first):
        await bench.submit(2, env)
    assert await bench.draw() == [5, 0, 1, 2, 3]


async def test_a_share_is_filled_with_packs_of_small_groups(bench: Bench) -> None:
    await bench.register(8)
    first, second = await bench.env(2, share=0.5), await bench.env(4)
    for env in (second, second):
        await bench.submit(4, env)
    for env in (first, first):
        await bench.submit(2, env)
    assert await bench.draw() == [2, 3, 0]


async def test_beside_shares_what_is_in_no_pack_waits_while_packs_make_a_batch(bench: Bench) -> None:
    """Groups without an environment, and of a size that does not divide the largest."""
    await bench.register(16)
    first, second = await bench.env(4, share=0.25), await bench.env(3)
    await bench.submit(4)
    for _ in range(4):
        await bench.submit(3, second)
    for _ in range(4):
        await bench.submit(4, first)
    assert await bench.draw() == [5, 6, 7, 8]


async def test_a_group_that_was_sent_in_vain_too_often_is_a_dead_letter(bench: Bench) -> None:
    await bench.register(8)
    await bench.submit(8)
    await bench.submit(8)
    for _ in range(3):
        lent = await bench.lend()
        assert lent is not None
        assert lent[1] == [0]
        await bench.queue.nack(lent[0])
    assert await bench.draw() == [1]
    assert await bench.reasons() == ["undeliverable"]


@pytest.mark.parametrize("seed", range(12))
async def test_every_batch_is_of_exact_size_and_every_group_is_somewhere_once(bench: Bench, seed: int) -> None:
    """Random sizes, environments with and without shares, and batches returned in between."""
    rng = random.Random(seed)
    batch_size = rng.choice([6, 8, 12, 16])
    await bench.register(batch_size)
    shares = [rng.choice([None, 0.1, 0.3, 0.5]) for _ in range(rng.randrange(4))]
    envs: list[int | None] = [None, *[await bench.env(rng.choice([1, 2, 4]), share) for share in shares]]
    delivered: list[int] = []
    for _ in range(60):
        await bench.submit(rng.choice([1, 2, 3, 4, 5, 8, 9]), rng.choice(envs))
        if rng.random() < 0.4 and (lent := await bench.lend()) is not None:
            assert sum(bench.sizes[number] for number in lent[1]) == batch_size
            if rng.random() < 0.3:
                await bench.queue.nack(lent[0])
            else:
                assert await bench.queue.ack(lent[0])
                delivered += lent[1]
    assert len(set(delivered)) == len(delivered)
    status = await bench.store.runs.status(RUN)
    pieces = [await bench.buffered(env) for env in envs if env is not None]
    assert len(delivered) + status.ready + status.dead + sum(pieces) == 60
    assert status.leased == 0
    assert await bench.kinds() == await bench.ready_by_kind()


async def test_a_queue_costs_the_same_whatever_its_length(lone_bench: Bench) -> None:
    """The count of Redis' commands for a batch, a status and an environment's status: 40 groups or 10,000. The last 8
    groups cost one command more each, because they stay as examples."""
    await lone_bench.register(16)
    env = await lone_bench.env(4)
    costs = []
    for length in (40, 10_000):
        await lone_bench.fill(length - len(lone_bench.sizes), 4, env)
        counts = []
        for ask in (lone_bench.queue.trainer, lambda: lone_bench.queue.env(env), lone_bench.draw):
            assert await ask() is not None  # its script is loaded, and the environment has sent a request
            before = await lone_bench.commands()
            assert await ask() is not None
            counts.append(await lone_bench.commands() - before)
        costs.append(counts)
    assert costs[0] == costs[1]


async def test_asking_in_vain_costs_the_same_whatever_the_queue_holds(lone_bench: Bench) -> None:
    """Groups of 3 make no batch of 16. The counts show that, without a walk."""
    await lone_bench.register(16)
    costs = []
    for length in (10, 1_000):
        await lone_bench.fill(length - len(lone_bench.sizes), 3)
        before = await lone_bench.commands()
        assert await lone_bench.draw() is None
        costs.append(await lone_bench.commands() - before)
    assert costs[0] == costs[1]
