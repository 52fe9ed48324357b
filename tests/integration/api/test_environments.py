"""Environments of a run: their registration, their time-out, and their shares of permits."""

from __future__ import annotations

import time

from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, trainer
from tests.integration.atropos_queue.store_harness import registration, scored
from tests.support.errors import raises

from gristmill_api.atropos.messages import RegisterEnv
from gristmill_api.atropos.queue import Queue
from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import LeaseSize


async def test_environment_keeps_its_latest_registration(harness: StoreHarness) -> None:
    envs = harness.store.envs
    await envs.register(RUN, "env-1", 2.0)
    since = await harness.redis.hget(PREFIX + "env:env-1", "registered_ms")
    assert abs(int(since or 0) / 1000 - time.time()) < 60
    await envs.heartbeat(RUN, "env-1")
    await envs.register(RUN, "env-1", None)
    (env,) = await envs.all(RUN)
    assert (env.weight, env.alive) == (None, True)
    assert await harness.redis.hget(PREFIX + "env:env-1", "registered_ms") == since
    await harness.redis.zadd(PREFIX + "envs", {"env-1": 1})
    await envs.heartbeat(RUN, "env-1")
    assert (await envs.all(RUN))[0].alive
    with raises(ApiProblem, "env_missing") as refused:
        await envs.heartbeat(RUN, "env-2")
    assert "'env-2'" in refused.value.message


async def test_permit_request_keeps_an_environment_alive_until_it_unregisters(harness: StoreHarness) -> None:
    await harness.start()
    await harness.store.envs.register(RUN, "env-1", 1.0)
    await harness.redis.zadd(PREFIX + "envs", {"env-1": 1}, xx=True)
    await harness.ask("env-1", 1)
    assert [env.alive for env in await harness.store.envs.all(RUN)] == [True]
    assert await harness.store.envs.unregister(RUN, "env-1")
    assert not await harness.store.envs.unregister(RUN, "env-1")
    assert await harness.store.envs.all(RUN) == []


async def test_unregistered_environment_leaves_nothing_in_redis(harness: StoreHarness) -> None:
    await harness.store.envs.register(RUN, "env-1", 1.0)
    await harness.store.envs.unregister(RUN, "env-1")
    assert await harness.redis.exists(PREFIX + "env:env-1", PREFIX + "envs") == 0


async def test_permits_are_shared_by_environment_weight(harness: StoreHarness) -> None:
    await harness.start(groups=8)
    await harness.store.envs.register(RUN, "heavy", 3.0)
    await harness.store.envs.register(RUN, "light", 1.0)
    await harness.store.envs.register(RUN, "without", None)
    assert len(await harness.ask("light", 8)) == 2, "a quarter of 8"
    assert len(await harness.ask("heavy", 8)) == 6
    assert await harness.ask("light", 1) == []
    await harness.store.permits.release_all(RUN, "heavy")
    assert await harness.ask("light", 8) == [], "it has its share already"
    await harness.redis.zadd(PREFIX + "envs", {"heavy": 1}, xx=True)
    assert len(await harness.ask("light", 8)) == 6, "other environments may use a dead environment's share"


async def test_share_of_an_atropos_environment_applies_to_its_ready_groups(harness: StoreHarness) -> None:
    """A trainer of /v1 leases the groups that Atropos' environments send at the root."""
    queue = Queue(harness.store, Limits(), "default")
    await queue.register(registration())
    record = await harness.store.runs.take("default", trainer(), [])
    await harness.store.runs.record_version("default", record.incarnation, 0)
    numbers = []
    for share in (None, 0.5):
        facts = RegisterEnv(max_token_length=64, desired_name="e", weight=1.0, group_size=2, min_batch_allocation=share)
        env = await queue.register_env(facts)
        assert env is not None
        numbers.append(env.number)
    for number, receipt in ((numbers[0], "r1"), (numbers[0], "r2"), (numbers[0], "r3"), (numbers[1], "r4")):
        await queue.submit(receipt, [scored(2, number)])

    async def lease(name: str) -> list[str]:
        batch = await harness.store.queue.lease("default", record.incarnation, name, LeaseSize("sequences", 4))
        return [leased.group_id for leased in batch.groups]

    assert await lease("b1") == ["a00000000", "a00000003"]
    assert await lease("b2") == [], "a group of the other is awaited"
    await harness.redis.zadd("gm:{default}:envs", {str(numbers[1]): 1}, xx=True)
    assert await lease("b2") == ["a00000001", "a00000002"]
