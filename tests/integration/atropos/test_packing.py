"""Which groups make a batch of Atropos' protocol, and what the choice costs. test_conversation.py compares our batches
with the batches of atroposlib's own server."""

from __future__ import annotations

import random

import pytest
from tests.integration.atropos.store_harness import RUN, StoreHarness


async def test_batches_come_in_the_order_of_their_groups(harness: StoreHarness) -> None:
    await harness.register(8)
    for _ in range(12):
        await harness.submit(4)
    assert await harness.draw_all() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


async def test_group_larger_than_a_batch_becomes_a_dead_letter(harness: StoreHarness) -> None:
    await harness.register(8)
    for size in (9, 8, 100, 8):
        await harness.submit(size)
    assert await harness.draw_all() == [[1], [3]]
    assert await harness.reasons() == ["larger_than_a_batch", "larger_than_a_batch"]


async def test_oldest_groups_of_odd_sizes_are_packed_first(harness: StoreHarness) -> None:
    await harness.register(10)
    for size in (3, 4, 7, 3, 3):
        await harness.submit(size)
    assert await harness.draw() == [0, 1, 3]
    assert await harness.draw() == [2, 4]


async def test_shares_apply_to_live_environments_only(harness: StoreHarness) -> None:
    await harness.register(8)
    first, second = await harness.env(4, share=0.5), await harness.env(4)
    for _ in range(4):
        await harness.submit(4, second)
    assert await harness.draw() is None
    await harness.submit(4, first)
    assert await harness.draw() == [0, 4]
    assert await harness.draw() is None
    await harness.silence(first)
    assert await harness.draw() == [1, 2]
    assert await harness.queue.env(first) is not None  # this request counts as a heartbeat
    await harness.submit(4, second)
    assert await harness.draw() is None


async def test_share_of_an_environment_with_odd_sizes_is_kept(harness: StoreHarness) -> None:
    await harness.register(10)
    first, second = await harness.env(3, share=0.3), await harness.env(7)
    await harness.submit(7, second)
    await harness.submit(3, second)
    assert await harness.draw() is None
    await harness.submit(3, first)
    assert await harness.draw() == [0, 2]


async def test_share_is_rounded_down_to_whole_groups(harness: StoreHarness) -> None:
    await harness.register(10)
    first, second = await harness.env(2, share=0.25), await harness.env(2)
    for env in (second, second, second, second, second, first, first):
        await harness.submit(2, env)
    assert await harness.draw() == [0, 1, 2, 3, 5]


async def test_share_is_filled_with_small_groups(harness: StoreHarness) -> None:
    await harness.register(8)
    first, second = await harness.env(2, share=0.5), await harness.env(4)
    for env in (second, second, first):
        await harness.submit(4 if env == second else 2, env)
    assert await harness.draw() is None, "another group of 2 is awaited"
    await harness.submit(2, first)
    assert await harness.draw() == [0, 2, 3]


async def test_share_is_kept_if_some_sum_keeps_it(harness: StoreHarness) -> None:
    """In order, groups of 3 and 4 leave a room of 1. The groups of 3 and 5 would fill the batch without the share."""
    await harness.register(8)
    first, second = await harness.env(4, share=0.5), await harness.env(4)
    for size, env in ((3, second), (5, second), (4, first), (4, second)):
        await harness.submit(size, env)
    assert await harness.draw() == [2, 3]


async def test_groups_without_an_environment_fill_the_room_that_shares_leave(harness: StoreHarness) -> None:
    await harness.register(16)
    first, second = await harness.env(4, share=0.25), await harness.env(3)
    await harness.submit(4)
    for _ in range(4):
        await harness.submit(3, second)
    for _ in range(4):
        await harness.submit(4, first)
    assert await harness.draw() == [0, 5, 6, 7]


async def test_group_with_too_many_failed_deliveries_becomes_a_dead_letter(harness: StoreHarness) -> None:
    await harness.register(8)
    await harness.submit(8)
    await harness.submit(8)
    for _ in range(3):
        lent = await harness.lend()
        assert lent is not None
        assert lent[1] == [0]
        await harness.queue.nack(lent[0])
    assert await harness.draw() == [1]
    assert await harness.reasons() == ["undeliverable"]


@pytest.mark.parametrize("seed", range(12))
async def test_every_batch_has_the_exact_size_and_no_group_is_lost_or_repeated(
    harness: StoreHarness, seed: int
) -> None:
    """Random sizes, environments with and without shares, and batches returned in between."""
    rng = random.Random(seed)
    batch_size = rng.choice([6, 8, 12, 16])
    await harness.register(batch_size)
    shares = [rng.choice([None, 0.1, 0.3, 0.5]) for _ in range(rng.randrange(4))]
    envs: list[int | None] = [None, *[await harness.env(rng.choice([1, 2, 4]), share) for share in shares]]
    delivered: list[int] = []
    for _ in range(60):
        await harness.submit(rng.choice([1, 2, 3, 4, 5, 8, 9]), rng.choice(envs))
        if rng.random() < 0.4 and (lent := await harness.lend()) is not None:
            assert sum(harness.sizes[number] for number in lent[1]) == batch_size
            if rng.random() < 0.3:
                await harness.queue.nack(lent[0])
            else:
                assert await harness.queue.ack(lent[0])
                delivered += lent[1]
    assert len(set(delivered)) == len(delivered)
    status = await harness.store.runs.status(RUN)
    pieces = [await harness.buffered(env) for env in envs if env is not None]
    assert len(delivered) + status.ready + status.dead + sum(pieces) == 60
    assert status.leased == 0
    assert await harness.kinds() == await harness.ready_by_kind()


@pytest.mark.long
async def test_redis_commands_do_not_depend_on_the_queue_length(lone_harness: StoreHarness) -> None:
    """The count of Redis' commands for a batch, a status and an environment's status: 40 groups or 10,000. The last 8
    groups cost one command more each, because they stay as examples."""
    await lone_harness.register(16)
    env = await lone_harness.env(4)
    costs = []
    for length in (40, 10_000):
        await lone_harness.fill(length - len(lone_harness.sizes), 4, env)
        counts = []
        for ask in (lone_harness.queue.trainer, lambda: lone_harness.queue.env(env), lone_harness.draw):
            assert await ask() is not None  # its script is loaded, and the environment has sent a request
            before = await lone_harness.commands()
            assert await ask() is not None
            counts.append(await lone_harness.commands() - before)
        costs.append(counts)
    assert costs[0] == costs[1]


async def test_draw_without_a_batch_costs_the_same_for_any_queue_length(lone_harness: StoreHarness) -> None:
    """Groups of 3 make no batch of 16. The counts show that, without a walk."""
    await lone_harness.register(16)
    costs = []
    for length in (10, 1_000):
        await lone_harness.fill(length - len(lone_harness.sizes), 3)
        before = await lone_harness.commands()
        assert await lone_harness.draw() is None
        costs.append(await lone_harness.commands() - before)
    assert costs[0] == costs[1]
