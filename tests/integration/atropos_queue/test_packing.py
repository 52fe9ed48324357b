"""The choice of the groups of a batch in Atropos' protocol, and the cost of the choice.

test_model.py compares random queues with a model. atropos/test_conversation.py compares our batches with the batches
of atroposlib's own server.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest
from redis.asyncio import Redis
from tests.integration.atropos_queue.store_harness import RUN, START, StoreHarness, scored
from tests.support.redis_server import RedisServer

SHARES: dict[str, tuple[int, list[float | None], list[tuple[int, int | None]], list[list[int]]]] = {
    "in the order of the groups": (8, [], [(4, None)] * 6, [[0, 1], [2, 3], [4, 5]]),
    "oldest groups of odd sizes first": (10, [], [(size, None) for size in (3, 4, 7, 3, 3)], [[0, 1, 3], [2, 4]]),
    "a share of odd sizes is awaited": (10, [0.3, None], [(7, 1), (3, 1)], []),
    "a share of odd sizes is kept": (10, [0.3, None], [(7, 1), (3, 1), (3, 0)], [[0, 2]]),
    "a share is of whole groups": (10, [0.25, None], [*[(2, 1)] * 5, (2, 0), (2, 0)], [[0, 1, 2, 3, 5]]),
    "another group of 2 is awaited": (8, [0.5, None], [(4, 1), (4, 1), (2, 0)], []),
    "small groups fill a share": (8, [0.5, None], [(4, 1), (4, 1), (2, 0), (2, 0)], [[0, 2, 3]]),
    "3 and 5 do not keep the share": (8, [0.5, None], [(3, 1), (5, 1), (4, 0), (4, 1)], [[2, 3]]),
    "groups without an environment": (16, [0.25, None], [(4, None), *[(3, 1)] * 4, *[(4, 0)] * 4], [[0, 5, 6, 7]]),
}


@pytest.fixture
async def lone_harness() -> AsyncIterator[StoreHarness]:
    """Over a Redis that no other API uses, so that only the test adds to its count of commands."""
    with RedisServer() as server:
        async with Redis.from_url(server.url) as client:
            yield StoreHarness(client)


async def draw(harness: StoreHarness) -> list[int] | None:
    """Returns the rows of the next batch, after its delivery."""
    if (batch := await harness.lend("atropos:drawn")) is None:
        return None
    assert await harness.queue.ack("atropos:drawn")
    await harness.redis.zrem(START + "acked", "atropos:drawn")  # The name may be used again.
    return [int(name[1:]) for name in batch]


@pytest.mark.parametrize(("batch_size", "shares", "groups", "batches"), SHARES.values(), ids=SHARES)
async def test_batches_are_those_expected(
    harness: StoreHarness, batch_size: int, shares: Sequence[float | None],
    groups: Sequence[tuple[int, int | None]], batches: list[list[int]],
) -> None:  # fmt: skip
    await harness.start(batch_size)
    for share in shares:
        await harness.env(share=share)
    await harness.submit(*(scored(size, env) for size, env in groups))
    assert [await draw(harness) for _ in batches] == batches
    if not batches:
        assert await draw(harness) is None


@pytest.mark.parametrize("seed", range(12))
async def test_every_batch_has_the_exact_size_and_no_group_is_lost_or_repeated(
    harness: StoreHarness, seed: int
) -> None:
    """Random sizes, environments with and without shares, and batches returned in between."""
    rng = random.Random(seed)
    batch_size = rng.choice([6, 8, 12, 16])
    await harness.start(batch_size)
    shares = [rng.choice([None, 0.1, 0.3, 0.5]) for _ in range(rng.randrange(4))]
    envs: list[int | None] = [None, *[await harness.env(rng.choice([1, 2, 4]), share) for share in shares]]
    sizes: list[int] = []
    delivered: list[str] = []
    for number in range(60):
        sizes.append(rng.choice([1, 2, 3, 4, 5, 8, 9]))
        await harness.submit(scored(sizes[-1], rng.choice(envs)))
        if rng.random() < 0.4 and (lent := await harness.lend(f"atropos:{number}")) is not None:
            assert sum(sizes[int(name[1:])] for name in lent) == batch_size
            if rng.random() < 0.3:
                await harness.queue.nack(f"atropos:{number}")
            else:
                assert await harness.queue.ack(f"atropos:{number}")
                delivered += lent
    assert len(set(delivered)) == len(delivered)
    status = await harness.store.runs.status(RUN)
    pieces = [await harness.redis.llen(f"{START}atropos:buffer:{env}") for env in envs if env is not None]
    assert len(delivered) + status.ready + status.dead + sum(pieces) == 60
    assert status.leased == 0
    kinds: Counter[bytes] = Counter()
    for name in await harness.ready():
        facts: dict[bytes, bytes] = await harness.redis.hgetall(f"{START}group:{name}")  # type: ignore[assignment]
        kinds[facts[b"sequences"] + b" " + facts[b"env_id"]] += 1
    assert await harness.redis.hgetall(START + "kinds") == {kind: str(count).encode() for kind, count in kinds.items()}


async def commands(harness: StoreHarness) -> int:
    """Returns how many commands Redis has run, including those inside scripts."""
    stats: dict[str, dict[str, int]] = await harness.redis.info("commandstats")
    return sum(stat["calls"] for name, stat in stats.items() if name != "cmdstat_info")


@pytest.mark.long
async def test_redis_commands_do_not_depend_on_the_queue_length(lone_harness: StoreHarness) -> None:
    """The count of Redis' commands for a batch, a status and an environment's status: 40 groups or 10,000. The last 8
    groups cost one command more each, because they stay as examples."""
    await lone_harness.start(16)
    env = await lone_harness.env(4)
    costs = []
    for more in (40, 9960):
        for _ in range(0, more, 40):
            await lone_harness.submit(*[scored(4, env)] * 40)
        counts = []
        for ask in (lone_harness.queue.trainer, lambda: lone_harness.queue.env(env), lambda: draw(lone_harness)):
            assert await ask() is not None  # its script is loaded, and the environment has sent a request
            before = await commands(lone_harness)
            assert await ask() is not None
            counts.append(await commands(lone_harness) - before)
        costs.append(counts)
    assert costs[0] == costs[1]


async def test_draw_without_a_batch_costs_the_same_for_any_queue_length(lone_harness: StoreHarness) -> None:
    """Groups of 3 make no batch of 16. The counts show that, without a walk."""
    await lone_harness.start(16)
    costs = []
    for more in (10, 990):
        await lone_harness.submit(*[scored(3)] * more)
        before = await commands(lone_harness)
        assert await draw(lone_harness) is None
        costs.append(await commands(lone_harness) - before)
    assert costs[0] == costs[1]
