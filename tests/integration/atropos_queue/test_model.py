"""Batches of exact numbers of sequences, compared with a model on random queues."""

from __future__ import annotations

import asyncio

import pytest
import redis
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from tests.integration.atropos_queue.packing_model import Ready, next_batch
from tests.integration.atropos_queue.store_harness import StoreHarness, names, scored

SIZES = st.sampled_from([1, 1, 2, 2, 2, 3, 4, 4, 4, 6, 8])
SHARES = st.sampled_from([None, None, 0.1, 0.25, 0.3, 0.5, 0.5, 0.75, 1.0, -0.5])
Groups = list[tuple[int, int | None]]


def groups(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[Groups]:
    """Returns the (size, environment) of each group, in order. Most queues have one or two environments."""
    return st.lists(st.tuples(sizes, st.sampled_from([0, 0, 0, 1, 1, 2, None])), min_size=1, max_size=24)


@pytest.mark.timeout(600)
@settings(
    max_examples=settings().max_examples * 2,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    queue=st.one_of(groups(SIZES), groups(st.sampled_from([2, 4, 8])), groups(st.sampled_from([4, 4, 4, 6]))),
    wanted=st.sampled_from([1, 2, 4, 6, 8, 8, 10, 12, 16, 24, 32]),
    shares=st.one_of(st.just((None, None, None)), st.tuples(SHARES, SHARES, SHARES)),
)
@example(queue=[(3, 0), (4, 0), (4, 0), (1, 0)], wanted=8, shares=(None, None, None))
@example(queue=[(4, 0)] * 4 + [(4, 1)] * 4, wanted=16, shares=(0.25, 0.75, None))
@example(queue=[(4, 0), (4, 1), (4, 2)] * 4, wanted=16, shares=(1.0, 1.0, 0.5))
@example(queue=[(1, 1)] * 8 + [(8, 0)] * 2, wanted=16, shares=(0.5, 0.5, None))
@example(queue=[(2, None)] * 4 + [(2, 0)], wanted=8, shares=(0.25, None, None))
@example(queue=[(6, 0), (4, 0), (4, 0)], wanted=8, shares=(None, None, None))
@example(queue=[(4, 1), (2, 1), (4, 1), (2, 1), (8, 2)], wanted=6, shares=(None, None, 0.3))
def test_batches_are_those_of_the_model(
    redis_url: str, queue: Groups, wanted: int, shares: tuple[float | None, float | None, float | None]
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    asyncio.run(_compare(redis_url, queue, wanted, shares))


async def _compare(url: str, queue: Groups, wanted: int, shares: tuple[float | None, ...]) -> None:
    async with Redis.from_url(url) as client:
        harness = StoreHarness(client)
        await harness.start(wanted)
        for share in shares:
            await harness.env(share=share)
        await harness.submit(*(scored(size, env) for size, env in queue))
        named = zip(names(*range(len(queue))), queue, strict=True)
        # A group that is larger than the batch is quarantined.
        left = [Ready(name, size, "" if env is None else str(env)) for name, (size, env) in named if size <= wanted]
        minima = [(str(number), share) for number, share in enumerate(shares) if share is not None]
        for number in range(len(queue) + 1):
            expected = next_batch(left, wanted, minima)
            found = await harness.lend(f"atropos:{number}")
            assert found == (None if expected is None else [group.name for group in expected])
            if expected is None:
                break
            left = [group for group in left if group not in expected]
