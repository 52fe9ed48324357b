"""Environments of a run: what they register, how long they live, their shares of permits and batches."""

from __future__ import annotations

import time

import pytest
from tests.integration.api.bench import PREFIX, RUN, Bench

from gristmill_api.errors import Refused


async def test_environments_keep_what_they_registered_last(bench: Bench) -> None:
    envs = bench.store.envs
    await envs.register(RUN, "env-1", 2.0, None)
    since = await bench.redis.hget(PREFIX + "env:env-1", "registered_ms")
    assert abs(int(since or 0) / 1000 - time.time()) < 60
    await envs.heartbeat(RUN, "env-1")
    await envs.register(RUN, "env-1", None, 0.25)
    (env,) = await envs.all(RUN)
    assert (env.weight, env.min_batch_allocation, env.alive) == (None, 0.25, True)
    assert await bench.redis.hget(PREFIX + "env:env-1", "registered_ms") == since
    await bench.redis.zadd(PREFIX + "envs", {"env-1": 1})
    await envs.heartbeat(RUN, "env-1")
    assert (await envs.all(RUN))[0].alive
    with pytest.raises(Refused, match="env-2"):
        await envs.heartbeat(RUN, "env-2")


async def test_an_environment_lives_by_asking_and_leaves(bench: Bench) -> None:
    await bench.start()
    await bench.store.envs.register(RUN, "env-1", 1.0, None)
    await bench.redis.zadd(PREFIX + "envs", {"env-1": 1}, xx=True)
    await bench.ask("env-1", 1)
    assert [env.alive for env in await bench.store.envs.all(RUN)] == [True]
    assert await bench.store.envs.leave(RUN, "env-1")
    assert not await bench.store.envs.leave(RUN, "env-1")
    assert await bench.store.envs.all(RUN) == []


async def test_an_environment_that_left_is_forgotten(bench: Bench) -> None:
    await bench.store.envs.register(RUN, "env-1", 1.0, 0.5)
    await bench.store.envs.leave(RUN, "env-1")
    assert await bench.redis.exists(PREFIX + "env:env-1", PREFIX + "envs") == 0


async def test_weights_share_the_permits(bench: Bench) -> None:
    await bench.start(groups=8)
    await bench.store.envs.register(RUN, "heavy", 3.0, None)
    await bench.store.envs.register(RUN, "light", 1.0, None)
    await bench.store.envs.register(RUN, "without", None, None)
    assert len(await bench.ask("light", 8)) == 2, "a quarter of 8"
    assert len(await bench.ask("heavy", 8)) == 6
    assert await bench.ask("light", 1) == []
    await bench.store.abandon(RUN, "heavy")
    assert await bench.ask("light", 8) == [], "it has its share already"
    await bench.redis.zadd(PREFIX + "envs", {"heavy": 1}, xx=True)
    assert len(await bench.ask("light", 8)) == 6, "a dead environment's share is anybody's"


async def test_a_share_is_kept_for_a_living_environment(bench: Bench) -> None:
    incarnation = await bench.start(groups=8)
    await bench.store.envs.register(RUN, "small", None, 0.5)
    big = await bench.send(*[("big", 10, 0)] * 4)
    assert await bench.lease(incarnation, "b1", 4) is None, "half of the batch is for small's groups"
    small = await bench.send(*[("small", 10, 0)] * 3)
    assert await bench.lease(incarnation, "b1", 4) == [*big[:2], *small[:2]]
    # A third of 2 groups is no whole group: nothing is kept.
    await bench.store.envs.register(RUN, "small", None, 0.3)
    assert await bench.lease(incarnation, "b2", 2) == big[2:]


async def test_shares_beyond_the_whole_are_scaled_down(bench: Bench) -> None:
    incarnation = await bench.start(groups=8)
    await bench.store.envs.register(RUN, "a", None, 1.0)
    await bench.store.envs.register(RUN, "b", None, 1.0)
    a = await bench.send(*[("a", 10, 0)] * 3)
    b = await bench.send(*[("b", 10, 0)] * 3)
    assert await bench.lease(incarnation, "b1", 4) == [*a[:2], *b[:2]]


async def test_a_dead_environments_share_blocks_nobody(bench: Bench) -> None:
    incarnation = await bench.start(groups=8)
    await bench.store.envs.register(RUN, "gone", None, 1.0)
    ids = await bench.send(*[("big", 10, 0)] * 2)
    assert await bench.lease(incarnation, "b1", 2) is None
    await bench.redis.zadd(PREFIX + "envs", {"gone": 1}, xx=True)
    assert [env.alive for env in await bench.store.envs.all(RUN)] == [False]
    assert await bench.lease(incarnation, "b1", 2) == ids
