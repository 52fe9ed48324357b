"""Leases by sequences and tokens, staleness, shares of environments, giving back."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from tests.integration.api.bench import RUN, Bench, submission, trainer

from gristmill_api.settings import Limits
from gristmill_api.store import Amount, Store, keys


async def send(bench: Bench, *kinds: tuple[str, int, int], holder: str = "env-1") -> list[str]:
    """Submit groups of (environment, tokens, step) in order."""
    ids = await bench.ask(holder, len(kinds))
    assert len(ids) == len(kinds)
    for group_id, (env_id, tokens, step) in zip(ids, kinds, strict=True):
        await bench.store.submit(RUN, holder, submission(group_id, env_id=env_id, tokens=tokens, step=step))
    return ids


async def lease(bench: Bench, incarnation: int, name: str, unit: str, count: int, **more: object) -> list[str]:
    amount = Amount(unit, count)  # type: ignore[arg-type]
    batch = await bench.store.lease(RUN, incarnation, name, amount, **more)  # type: ignore[arg-type]
    return [leased.group_id for leased in batch.groups]


async def test_sequences_are_exact(bench: Bench) -> None:
    incarnation = await bench.start()
    ids = await bench.fill(4)
    assert await lease(bench, incarnation, "b1", "sequences", 3) == [], "groups of 2 never make 3"
    assert await lease(bench, incarnation, "b1", "sequences", 4) == ids[:2]
    assert await lease(bench, incarnation, "b2", "sequences", 6) == []
    assert (await bench.whereabouts())["ready"] == ids[2:]


async def test_a_token_budget_is_filled_in_order(bench: Bench) -> None:
    incarnation = await bench.start(groups=8)
    ids = await send(bench, *(("env-1", tokens, 0) for tokens in (10, 20, 50, 5, 5)))
    assert await lease(bench, incarnation, "b1", "tokens", 45) == ids[:2], "50 do not fit, and nobody passes them"
    assert await lease(bench, incarnation, "b2", "tokens", 20) == ids[2:3], "one group at least, whatever its size"
    assert await lease(bench, incarnation, "b3", "tokens", 11) == [], "there may be more to come"
    assert await lease(bench, incarnation, "b3", "tokens", 11, partial=True) == ids[3:]
    assert await lease(bench, incarnation, "b4", "tokens", 11, partial=True) == [], "nothing is not a batch"


async def test_stale_groups_are_dropped_with_a_reason_and_replaced(bench: Bench) -> None:
    incarnation = await bench.start(staleness=3, groups=1)
    old, fresh = await send(bench, ("env-1", 10, 0), ("env-1", 10, 2))
    await bench.store.record_version(RUN, incarnation, 3)
    outstanding = await bench.ask("env-2", 9)
    assert len(outstanding) == 5
    batch = await bench.store.lease(RUN, incarnation, "b1", Amount("groups", 1), max_staleness=2)
    assert [group.group_id for group in batch.groups] == [fresh]
    assert (batch.stale, batch.dead) == (1, 0)
    status = await bench.store.status(RUN)
    assert (status.dropped, status.accepted, status.bytes) == ({"stale": 1}, 1, 100)
    assert (await bench.store.audit(RUN)).dropped == {old: "stale"}
    assert await bench.ask("env-2", 9) == ["g00000007"], "training needs a group in its stead"


async def test_a_group_as_old_as_allowed_is_leased(bench: Bench) -> None:
    incarnation = await bench.start(staleness=3, groups=1)
    (group,) = await send(bench, ("env-1", 10, 0))
    await bench.store.record_version(RUN, incarnation, 2)
    assert await lease(bench, incarnation, "b1", "groups", 1, max_staleness=2) == [group]


async def test_a_share_is_kept_for_a_living_environment(bench: Bench) -> None:
    incarnation = await bench.start(groups=8)
    await bench.store.envs.register(RUN, "small", None, 0.5)
    big = await send(bench, *[("big", 10, 0)] * 4)
    assert await lease(bench, incarnation, "b1", "groups", 4) == [], "half of the batch is for small's groups"
    small = await send(bench, *[("small", 10, 0)] * 3)
    assert await lease(bench, incarnation, "b1", "groups", 4) == [*big[:2], *small[:2]]
    # A third of 2 groups is no whole group: nothing is kept.
    await bench.store.envs.register(RUN, "small", None, 0.3)
    assert await lease(bench, incarnation, "b2", "groups", 2) == big[2:]


async def test_shares_beyond_the_whole_are_scaled_down(bench: Bench) -> None:
    incarnation = await bench.start(groups=8)
    await bench.store.envs.register(RUN, "a", None, 1.0)
    await bench.store.envs.register(RUN, "b", None, 1.0)
    a = await send(bench, *[("a", 10, 0)] * 3)
    b = await send(bench, *[("b", 10, 0)] * 3)
    assert await lease(bench, incarnation, "b1", "groups", 4) == [*a[:2], *b[:2]]


async def test_a_dead_environments_share_blocks_nobody(bench: Bench) -> None:
    incarnation = await bench.start(groups=8)
    await bench.store.envs.register(RUN, "gone", None, 1.0)
    ids = await send(bench, *[("big", 10, 0)] * 2)
    assert await lease(bench, incarnation, "b1", "groups", 2) == []
    await bench.redis.zadd(keys.prefix(RUN) + "envs", {"gone": 1}, xx=True)
    assert [env.alive for env in await bench.store.envs.all(RUN)] == [False]
    assert await lease(bench, incarnation, "b1", "groups", 2) == ids


async def test_weights_share_the_permits(bench: Bench) -> None:
    await bench.start(groups=8)
    await bench.store.envs.register(RUN, "heavy", 3.0, None)
    await bench.store.envs.register(RUN, "light", 1.0, None)
    assert len(await bench.ask("light", 8)) == 2, "a quarter of 8"
    assert len(await bench.ask("heavy", 8)) == 6
    assert await bench.ask("light", 1) == []
    await bench.store.abandon(RUN, "heavy")
    assert await bench.ask("light", 8) == [], "it has its share already"
    await bench.redis.zadd(keys.prefix(RUN) + "envs", {"heavy": 1}, xx=True)
    assert len(await bench.ask("light", 8)) == 6, "a dead environment's share is anybody's"


async def test_an_environment_lives_by_asking_and_leaves(bench: Bench) -> None:
    await bench.start()
    await bench.store.envs.register(RUN, "env-1", 1.0, None)
    await bench.redis.zadd(keys.prefix(RUN) + "envs", {"env-1": 1}, xx=True)
    await bench.ask("env-1", 1)
    assert [env.alive for env in await bench.store.envs.all(RUN)] == [True]
    assert await bench.store.envs.leave(RUN, "env-1")
    assert not await bench.store.envs.leave(RUN, "env-1")
    assert await bench.store.envs.all(RUN) == []


async def test_given_back_is_ready_at_once_in_its_place(bench: Bench) -> None:
    incarnation = await bench.start()
    ids = await bench.fill(4)
    await bench.lease(incarnation, "b1", 2)
    assert await bench.store.nack(RUN, incarnation, ["b1", "never"]) == 2
    assert await bench.store.nack(RUN, incarnation, ["b1"]) == 0, "a retry"
    assert await bench.whereabouts() == {"ready": ids}
    assert (await bench.store.ack(RUN, incarnation, ["b1"])).lost == ["b1"]
    assert await bench.lease(incarnation, "b2", 4) == ids
    assert (await bench.store.status(RUN)).redeliveries == 2


async def test_the_walk_has_a_bound(redis: Redis) -> None:
    """An environment that holds a share but sends nothing must not make each lease read a whole long queue."""
    bench = Bench(Store(redis, Limits()), redis)
    await bench.create()
    incarnation = (await bench.store.take(RUN, trainer(groups=5000), [])).incarnation
    await bench.store.record_version(RUN, incarnation, 0)
    await bench.store.envs.register(RUN, "silent", None, 0.5)
    for _ in range(5):
        await bench.fill(1000)
    before = (await redis.info("commandstats"))["cmdstat_hmget"]["calls"]
    assert await bench.lease(incarnation, "b1", 8) is None
    assert (await redis.info("commandstats"))["cmdstat_hmget"]["calls"] - before <= 4096 + 64


@pytest.mark.parametrize("unit", ["groups", "sequences", "tokens"])
async def test_a_retry_is_the_same_batch_whatever_it_asks_for(bench: Bench, unit: str) -> None:
    incarnation = await bench.start()
    ids = await bench.fill(4)
    assert await bench.lease(incarnation, "b1", 2) == ids[:2]
    assert await lease(bench, incarnation, "b1", unit, 1) == ids[:2]
    await bench.expire_lease("b1")
    assert await bench.lease(incarnation, "b2", 9) is None
    assert await lease(bench, incarnation, "b1", unit, 1) == ids[:2], "it ran out, and nobody has its groups"


async def test_a_batch_may_be_larger_than_what_lua_unpacks_at_once(bench: Bench) -> None:
    """1024 at a time: a batch of one, two and a bit of such chunks is whole, each group once and in order."""
    incarnation = await bench.start(groups=2100)
    ids: list[str] = []
    while len(ids) < 2060:
        ids += await bench.fill(min(256, 2060 - len(ids)))
    assert await bench.lease(incarnation, "b1", 2050) == ids[:2050]
    assert (await bench.store.audit(RUN)).leased == ids[:2050]
    assert await bench.lease(incarnation, "b2", 10) == ids[2050:]
    assert await bench.store.nack(RUN, incarnation, ["b1"]) == 2050
    assert (await bench.store.audit(RUN)).ready == ids[:2050]
