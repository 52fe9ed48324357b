"""Bounds and corners of the store that the other tests do not stand on: found by mutants of its scripts that lived."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.integration.api.bench import RUN, Bench, submission, trainer

from gristmill import MetricsRow, Protocol
from gristmill_api.errors import Refused
from gristmill_api.settings import Limits
from gristmill_api.store import Amount, Store, keys

START = keys.prefix(RUN)


async def send(bench: Bench, *env_ids: str) -> list[str]:
    """A group of each environment, in order."""
    ids = await bench.ask("env-1", len(env_ids))
    for group_id, env_id in zip(ids, env_ids, strict=True):
        await bench.store.submit(RUN, "env-1", submission(group_id, env_id=env_id))
    return ids


async def refusal(bench: Bench, group_id: str) -> str:
    with pytest.raises(Refused) as refused:
        await bench.submit("env-1", group_id)
    assert refused.value.status == 429
    return refused.value.message


async def test_times_are_redis_clock_in_milliseconds(bench: Bench) -> None:
    bench.store = Store(bench.redis, Limits(permit_ttl_s=1000, lease_ttl_s=2000, env_ttl_s=3000))
    before = time.time()
    incarnation = await bench.start()
    await bench.store.envs.register(RUN, "env-1", None, None)
    _, b, _ = await bench.fill(3)
    await bench.lease(incarnation, "b1", 1)
    (permit,) = await bench.ask("env-1", 1)
    after = time.time()

    async def deadline(key: str, member: str) -> float:
        score = await bench.redis.zscore(START + key, member)
        assert score is not None
        return float(score) / 1000

    slack = 0.01
    assert before + 2000 - slack <= await deadline("leases", "b1") <= after + 2000 + slack
    assert before + 3000 - slack <= await deadline("envs", "env-1") <= after + 3000 + slack
    at = int(await bench.redis.hget(START + f"group:{b}", "at") or 0) / 1000
    assert before - slack <= at <= after + slack
    assert (await bench.store.record(RUN)).created_at <= after + slack
    assert before + 1000 - slack <= await deadline("permits", permit) <= after + 1000 + slack
    await bench.store.extend(RUN, incarnation, ["b1"])
    await bench.store.renew(RUN, "env-1", [permit])
    assert before + 2000 - slack <= await deadline("leases", "b1") <= time.time() + 2000 + slack
    assert before + 1000 - slack <= await deadline("permits", permit) <= time.time() + 1000 + slack


async def test_what_is_ready_is_counted_by_environment_and_size(bench: Bench) -> None:
    """The counts that say what a batch can be made of, after every way into and out of the queue."""
    bench.store = Store(bench.redis, Limits(max_attempts=1))
    incarnation = await bench.start(groups=8)
    ids = await send(bench, "x", "y", "x", "y", "x", "x")

    async def agree() -> dict[str, int]:
        counted: Any = await bench.redis.hgetall(START + "kinds")
        found: Counter[str] = Counter()
        for group_id in (await bench.store.audit(RUN)).ready:
            facts: Any = await bench.redis.hmget(START + f"group:{group_id}", "sequences", "env_id")
            found[" ".join(value.decode() for value in facts)] += 1
        assert {kind.decode(): int(count) for kind, count in counted.items()} == found
        return dict(found)

    assert await agree() == {"2 x": 4, "2 y": 2}
    await bench.lease(incarnation, "b1", 2)
    assert await agree() == {"2 x": 3, "2 y": 1}
    await bench.store.nack(RUN, incarnation, ["b1"])
    assert await agree() == {"2 x": 4, "2 y": 2}
    assert await bench.lease(incarnation, "b2", 2) == ids[2:4], "the first two are dead now"
    assert await agree() == {"2 x": 2}
    await bench.expire_lease("b2")
    assert await bench.lease(incarnation, "b3", 1) == ids[4:5]
    assert await agree() == {"2 x": 1}
    await bench.store.dead.replay(RUN, ids[:2])
    assert await agree() == {"2 x": 2, "2 y": 1}
    await bench.store.take(RUN, trainer(groups=8), [ids[0]])
    assert await agree() == {"2 x": 2, "2 y": 1}


async def test_caps_are_reached_and_not_passed(bench: Bench) -> None:
    await bench.start()
    a, b, c, d = await bench.ask("env-1", 4)
    bench.store = Store(bench.redis, Limits(max_stored_bytes=100))
    assert await bench.submit("env-1", a)
    assert "would pass 100" in await refusal(bench, b)
    bench.store = Store(bench.redis, Limits(max_run_bytes=200))
    assert await bench.submit("env-1", b)
    assert "holds 2 groups of 200 bytes" in await refusal(bench, c)
    bench.store = Store(bench.redis, Limits(max_run_groups=3))
    assert await bench.submit("env-1", c)
    assert "holds 3 groups" in await refusal(bench, d)


async def test_groups_in_every_state_count_against_the_cap(bench: Bench) -> None:
    """Leased, dead and waiting for the archive: they all hold memory."""
    bench.store = Store(bench.redis, Limits(max_attempts=1), archive=True)
    incarnation = await bench.start(groups=8)
    await bench.fill(4)
    await bench.lease(incarnation, "b1", 1)
    await bench.store.ack(RUN, incarnation, ["b1"])
    await bench.lease(incarnation, "b2", 1)
    await bench.store.nack(RUN, incarnation, ["b2"])
    await bench.lease(incarnation, "b3", 1)
    status = await bench.store.status(RUN)
    assert (status.ready, status.leased, status.dead, status.archiving, status.trained) == (1, 1, 1, 1, 1)
    (more,) = await bench.ask("env-1", 1)
    bench.store = Store(bench.redis, Limits(max_run_groups=4))
    assert "holds 4 groups" in await refusal(bench, more)
    bench.store = Store(bench.redis, Limits(max_run_groups=5))
    assert await bench.submit("env-1", more)


async def test_archived_groups_leave_and_only_they(bench: Bench) -> None:
    bench.store = Store(bench.redis, Limits(), archive=True)
    incarnation = await bench.start()
    a, b, c, d = await bench.fill(4)
    await bench.lease(incarnation, "b1", 3)
    await bench.store.ack(RUN, incarnation, ["b1"])
    assert await bench.store.archive.head(RUN, 9) == [a, b, c]
    assert await bench.store.payload(RUN, b) is not None
    await bench.store.archive.archived(RUN, [a, d, "g00000099"])
    assert await bench.store.archive.head(RUN, 9) == [b, c]
    await bench.store.archive.archived(RUN, [a])
    status = await bench.store.status(RUN)
    assert (status.archiving, status.trained, status.ready, status.bytes) == (2, 3, 1, 300)
    assert [await bench.store.payload(RUN, name) is None for name in (a, b, c, d)] == [True, False, False, False]
    assert await bench.store.scripts.run("archived", START, b, a, d) == [b"OK", 1]
    with pytest.raises(Refused):
        await bench.store.archive.archived("nowhere", [a])
    await bench.store.close_run(RUN)
    with pytest.raises(Refused) as refused:
        await bench.store.delete_run(RUN)
    assert refused.value.status == 409
    assert "1 " in refused.value.message
    await bench.store.archive.archived(RUN, [c])
    await bench.store.delete_run(RUN)
    assert int(await bench.redis.get(keys.BYTES) or 0) == 0
    assert await bench.redis.keys(START + "*") == []


async def test_a_resumed_trainers_groups_are_archived_too(bench: Bench) -> None:
    bench.store = Store(bench.redis, Limits(), archive=True)
    incarnation = await bench.start()
    a, b, _, _ = await bench.fill(4)
    await bench.lease(incarnation, "b1", 1)
    await bench.store.take(RUN, trainer(), [a, b])
    assert await bench.store.archive.head(RUN, 9) == [a, b]


async def test_acked_names_are_kept_up_to_a_bound(bench: Bench) -> None:
    incarnation = await bench.start()
    await bench.redis.zadd(START + "acked", {f"old{number}": number for number in range(5000)})
    await bench.fill(1)
    await bench.lease(incarnation, "b1", 1)
    await bench.store.ack(RUN, incarnation, ["b1"])
    assert await bench.redis.zcard(START + "acked") == 4096
    assert await bench.redis.zscore(START + "acked", "b1") is not None, "the newest stay"


async def test_status_tells_of_the_head_of_the_queue(bench: Bench) -> None:
    assert (await bench.store.status(RUN)).version is None
    incarnation = await bench.start(staleness=3)
    status = await bench.store.status(RUN)
    assert (status.oldest_ready_s, status.oldest_ready_staleness, status.envs) == (None, None, 0)
    for row, step in enumerate((1, 0, 2)):
        (group_id,) = await bench.ask("env-1", 1)
        assert group_id == f"g{row:08d}"
        await bench.submit("env-1", group_id, step=step)
    await bench.store.record_version(RUN, incarnation, 3)
    await bench.redis.hset(START + "group:g00000000", "at", int(time.time() * 1000) - 5000)
    await bench.redis.hset(START + "group:g00000001", "at", int(time.time() * 1000) - 9000)
    await bench.store.envs.register(RUN, "here", None, None)
    await bench.store.envs.register(RUN, "gone", None, None)
    await bench.redis.zadd(START + "envs", {"gone": 1})
    status = await bench.store.status(RUN)
    assert status.oldest_ready_s is not None
    assert 4.9 < status.oldest_ready_s < 8
    assert (status.oldest_ready_staleness, status.envs, status.version) == (2, 1, f"{incarnation}.3")


async def test_status_tells_when_an_environment_was_last_heard(bench: Bench) -> None:
    await bench.start()
    status = await bench.store.status(RUN)
    assert (status.last_asked_s, status.last_submit_s) == (None, None)
    (group_id,) = await bench.ask("env-1", 1)
    await bench.submit("env-1", group_id)
    await bench.redis.hincrby(START + "counters", "asked_ms", -60_000)
    await bench.redis.hincrby(START + "counters", "submitted_ms", -90_000)
    status = await bench.store.status(RUN)
    assert status.last_asked_s is not None
    assert status.last_submit_s is not None
    assert 60 <= status.last_asked_s < 90 <= status.last_submit_s
    await bench.ask("env-1", 1)
    assert ((await bench.store.status(RUN)).last_asked_s or 99) < 60


async def test_a_batch_tells_sizes_and_schema(bench: Bench) -> None:
    incarnation = await bench.start()
    (name,) = await bench.ask("env-1", 1)
    sent = submission(name)
    await bench.store.submit(RUN, "env-1", type(sent)(**{**vars(sent), "raw_bytes": 345}))
    for _ in range(2):  # and so does the retry
        (leased,) = (await bench.store.lease(RUN, incarnation, "b1", Amount("groups", 1))).groups
        assert (leased.group_id, leased.size, leased.raw_size, leased.schema) == (name, 100, 345, "group")


async def test_metrics_keep_the_newest_rows_and_one_a_step(bench: Bench) -> None:
    journal = bench.store.journal

    async def measure(step: int, loss: float, source: str = "trainer") -> None:
        await journal.measure(RUN, MetricsRow(source=source, step=step, values={"loss": loss}))

    await bench.redis.zadd(
        START + "metrics:trainer", {f'{{"step": {step}, "values": {{}}}}': step for step in range(10_000)}
    )
    await measure(9_999, 1.0)
    assert await bench.redis.zcard(START + "metrics:trainer") == 10_000
    await measure(10_000, 2.0)
    await measure(10_000, 3.0)
    await measure(1, 4.0, "env-1")
    assert await bench.redis.zcard(START + "metrics:trainer") == 10_000
    rows = await journal.rows(RUN, "trainer", 9_997, 9)
    assert [(row.step, row.values.get("loss")) for row in rows] == [(9998, None), (9999, 1.0), (10_000, 3.0)]
    assert (await journal.rows(RUN, "trainer", -1, 1))[0].step == 1
    assert await journal.sources(RUN) == ["env-1", "trainer"]
    with pytest.raises(Refused):
        await journal.measure("nowhere", MetricsRow(source="t", step=1, values={}))


async def test_environments_keep_what_they_registered_last(bench: Bench) -> None:
    envs = bench.store.envs
    await envs.register(RUN, "env-1", 2.0, None)
    since = await bench.redis.hget(START + "env:env-1", "registered_ms")
    assert abs(int(since or 0) / 1000 - time.time()) < 60
    await envs.heartbeat(RUN, "env-1")
    await envs.register(RUN, "env-1", None, 0.25)
    (env,) = await envs.all(RUN)
    assert (env.weight, env.min_batch_allocation, env.alive) == (None, 0.25, True)
    assert await bench.redis.hget(START + "env:env-1", "registered_ms") == since
    await bench.redis.zadd(START + "envs", {"env-1": 1})
    await envs.heartbeat(RUN, "env-1")
    assert (await envs.all(RUN))[0].alive
    with pytest.raises(Refused, match="env-2"):
        await envs.heartbeat(RUN, "env-2")
    for call in (
        envs.register("nowhere", "e", None, None),
        envs.heartbeat("nowhere", "e"),
        envs.leave("nowhere", "e"),
        bench.store.dead.replay("nowhere", None),
        bench.store.dead.purge("nowhere", None),
        bench.store.renew("nowhere", "e", None),
        bench.store.abandon("nowhere", "e"),
        bench.store.give_back("nowhere", "e", "g00000000", "abandoned"),
        bench.store.permits("nowhere", "e", 1),
        bench.store.ack("nowhere", 1, []),
        bench.store.nack("nowhere", 1, []),
        bench.store.extend("nowhere", 1, []),
        bench.store.record_version("nowhere", 1, 0),
        bench.store.finish("nowhere", 1),
        bench.store.delete_run("nowhere"),
    ):
        with pytest.raises(Refused, match="no run 'nowhere'"):
            await call


async def test_a_fenced_trainer_gives_nothing_back(bench: Bench) -> None:
    old = await bench.start()
    new = await bench.start()
    await bench.fill(1)
    await bench.lease(new, "b1", 1)
    with pytest.raises(Refused) as refused:
        await bench.store.nack(RUN, old, ["b1"])
    assert refused.value.code == "fenced"
    assert (await bench.store.status(RUN)).leased == 1


async def test_a_finished_runs_version_may_be_told_again(bench: Bench) -> None:
    incarnation = await bench.start()
    await bench.store.record_version(RUN, incarnation, 2)
    await bench.store.finish(RUN, incarnation)
    assert (await bench.store.record_version(RUN, incarnation, 2)).version == f"{incarnation}.2"
    with pytest.raises(Refused) as refused:
        await bench.store.record_version(RUN, incarnation, 3)
    assert refused.value.code == "finished"


async def test_deadlines_that_are_now_are_over(redis: Redis) -> None:
    """A lease or permit lives until its deadline, and not at it; an environment the same."""
    bench = Bench(Store(redis, Limits(lease_ttl_s=0.001, permit_ttl_s=0.001, env_ttl_s=0.001)), redis)
    await bench.create()
    incarnation = await bench.start()
    await bench.store.envs.register(RUN, "env-1", 1.0, 1.0)
    first = await bench.ask("env-2", 1)
    await asyncio.sleep(0.01)
    assert await bench.ask("env-3", 1) == first, "it went to another"
    await bench.submit("env-3", first[0])
    assert await bench.lease(incarnation, "b1", 1) == first, "nobody's share is kept any more"
    await asyncio.sleep(0.01)
    assert await bench.lease(incarnation, "b2", 1) == first
    assert (await bench.store.status(RUN)).lease_expiries == 1


async def test_tombstones_of_dropped_groups_go_with_the_oldest(bench: Bench) -> None:
    """Of permits that were dropped, and of groups that were given up after their submit."""
    bench.store = Store(bench.redis, Limits(max_attempts=1))
    incarnation = await bench.start(groups=8)
    a, b, c, d = await bench.ask("env-1", 4)
    await bench.store.give_back(RUN, "env-1", a, "too_long")
    await bench.submit("env-1", b)
    await bench.lease(incarnation, "b1", 1)
    await bench.store.nack(RUN, incarnation, ["b1"])
    await bench.lease(incarnation, "b2", 1)
    await bench.store.dead.purge(RUN, [b])
    assert await bench.redis.lrange(START + "tombs", 0, -1) == [a.encode(), b.encode()]
    await bench.redis.rpush(START + "tombs", *(f"x{number}" for number in range(65_534)))
    await bench.store.give_back(RUN, "env-1", c, "too_long")
    assert set((await bench.store.audit(RUN)).dropped) == {b, c}
    await bench.store.give_back(RUN, "env-1", d, "too_long")
    assert set((await bench.store.audit(RUN)).dropped) == {c, d}
    assert (await bench.store.status(RUN)).dropped == {"too_long": 3, "purged": 1}, "counts do not forget"


async def test_a_batchs_name_that_is_used_again_owes_nothing_to_its_old_groups(bench: Bench) -> None:
    bench.store = Store(bench.redis, Limits(max_attempts=1))
    incarnation = await bench.start()
    a, b, c, d = await bench.fill(4)
    assert await bench.lease(incarnation, "b1", 2) == [a, b]
    await bench.store.nack(RUN, incarnation, ["b1"])
    assert await bench.lease(incarnation, "b1", 2) == [c, d], "the first two are dead now"
    await bench.expire_lease("b1")
    await bench.store.dead.replay(RUN, None)
    assert await bench.lease(incarnation, "b2", 2) == [a, b]
    assert (await bench.store.ack(RUN, incarnation, ["b1"])).groups == 2, "nobody has c and d"
    assert await bench.whereabouts() == {"leased": [a, b], "trained": [c, d]}


async def test_a_late_ack_is_told_twice_and_counts_once(bench: Bench) -> None:
    incarnation = await bench.start()
    await bench.fill(1)
    await bench.lease(incarnation, "b1", 1)
    await bench.expire_lease("b1")
    assert await bench.lease(incarnation, "b2", 2) is None
    done = await bench.store.ack(RUN, incarnation, ["b1"])
    assert (done.batches, done.groups, done.already) == (1, 1, 0)
    done = await bench.store.ack(RUN, incarnation, ["b1"])
    assert (done.batches, done.groups, done.already) == (0, 0, 1)


async def test_sequences_and_bytes_follow_a_batch_that_lives_again(bench: Bench) -> None:
    incarnation = await bench.start()
    await bench.fill(3)
    await bench.lease(incarnation, "b1", 2)

    async def counts() -> tuple[dict[str, int], dict[str, int]]:
        status = await bench.store.status(RUN)
        return status.sequences, status.bytes_by_state

    held = {"ready": 2, "leased": 4, "dead": 0}, {"ready": 100, "leased": 200, "dead": 0}
    back = {"ready": 6, "leased": 0, "dead": 0}, {"ready": 300, "leased": 0, "dead": 0}
    assert await counts() == held
    for number in range(2):
        await bench.expire_lease("b1")
        assert await bench.lease(incarnation, "b2", 9) is None
        assert await counts() == back
        if number:
            await bench.store.extend(RUN, incarnation, ["b1"])
        else:
            await bench.lease(incarnation, "b1", 2)
        assert await counts() == held
    assert await bench.redis.zscore(START + "leases", "b1") is not None
    assert await bench.redis.scard(START + "expired") == 0


async def test_rows_come_back_in_order_however_long_their_numbers(bench: Bench) -> None:
    await bench.start()
    await bench.redis.hset(START + "counters", "rows", 9_999_998)
    ids = ["g09999998", "g09999999", "g10000000", "g10000001"]
    assert await bench.ask("env-1", 4) == ids
    await bench.store.abandon(RUN, "env-1")
    assert await bench.ask("env-1", 4) == ids
    for group_id in ids:
        await bench.store.give_back(RUN, "env-1", group_id, "abandoned")
    assert await bench.ask("env-1", 4) == ids
    await bench.expire_permits(*ids)
    assert await bench.ask("env-2", 4) == ids


async def test_a_run_that_is_not_there_is_missing_to_every_verb(bench: Bench) -> None:
    store, run = bench.store, "none"
    for call in (
        store.permits(run, "env-1", 1),
        store.renew(run, "env-1", None),
        store.give_back(run, "env-1", "g00000000", "abandoned"),
        store.abandon(run, "env-1"),
        store.submit(run, "env-1", submission("g00000000")),
        store.lease(run, 1, "b1", Amount("groups", 1)),
        store.extend(run, 1, ["b1"]),
        store.nack(run, 1, ["b1"]),
        store.ack(run, 1, ["b1"]),
        store.record_version(run, 1, 0),
        store.finish(run, 1),
        store.close_run(run),
        store.delete_run(run),
        store.status(run),
        store.dead.replay(run, None),
        store.dead.purge(run, None),
        store.envs.register(run, "env-1", None, None),
        store.envs.leave(run, "env-1"),
        store.journal.measure(run, MetricsRow(source="trainer", step=1, values={"loss": 1.0})),
    ):
        with pytest.raises(Refused) as refused:
            await call
        assert refused.value.code == "run_missing", call
    for script, arguments in {"take": ("{}", 1, 1, 1, ""), "archived": ("g00000000",)}.items():
        assert await store.scripts.run(script, keys.prefix(run), *arguments) == [b"MISSING"]
    assert await bench.redis.keys(keys.prefix(run) + "*") == []


async def test_a_run_fed_by_atropos_has_no_permits(bench: Bench) -> None:
    await bench.store.create_run("other", {}, 2, None, Protocol.ATROPOS)
    with pytest.raises(Refused) as refused:
        await bench.store.permits("other", "env-1", 1)
    assert refused.value.code == "no_permits"


async def test_a_stored_payload_stays(bench: Bench) -> None:
    """Until then it was under a key that goes by itself."""
    await bench.start()
    (group,) = await bench.fill(1)
    assert await bench.redis.pttl(keys.payload(RUN, group)) == -1


async def test_a_lease_tells_how_many_it_gave_up(bench: Bench) -> None:
    bench.store = Store(bench.redis, Limits(max_attempts=1))
    incarnation = await bench.start()
    *_, last = await bench.fill(3)
    await bench.lease(incarnation, "b1", 2)
    await bench.store.nack(RUN, incarnation, ["b1"])
    batch = await bench.store.lease(RUN, incarnation, "b2", Amount("groups", 1))
    assert ([group.group_id for group in batch.groups], batch.dead, batch.stale) == ([last], 2, 0)


async def test_a_batch_of_which_a_group_was_dropped_cannot_be_acked(bench: Bench) -> None:
    incarnation = await bench.start(staleness=3, groups=2)
    ids = await bench.fill(2)
    await bench.lease(incarnation, "b1", 2)
    await bench.expire_lease("b1")
    await bench.store.record_version(RUN, incarnation, 3)
    batch = await bench.store.lease(RUN, incarnation, "b2", Amount("groups", 1), max_staleness=2)
    assert (batch.groups, batch.stale) == ([], 2)
    assert (await bench.store.ack(RUN, incarnation, ["b1"])).lost == ["b1"]
    assert (await bench.store.audit(RUN)).dropped == dict.fromkeys(ids, "stale")


async def test_an_environment_that_left_is_forgotten(bench: Bench) -> None:
    await bench.store.envs.register(RUN, "env-1", 1.0, 0.5)
    await bench.store.envs.leave(RUN, "env-1")
    assert await bench.redis.exists(START + "env:env-1", START + "envs") == 0


async def test_all_of_a_holders_permits_are_renewed_and_nobody_elses(bench: Bench) -> None:
    await bench.start()
    mine, others = await bench.ask("env-1", 2), await bench.ask("env-2", 2)
    far = 5_000_000_000_000
    await bench.redis.zadd(START + "permits", dict.fromkeys(mine + others, far))
    assert (await bench.store.renew(RUN, "env-1", None)).renewed == 2
    deadlines = await bench.redis.zmscore(START + "permits", mine + others)
    assert [deadline == far for deadline in deadlines] == [False, False, True, True]


async def test_a_replayed_group_is_dead_for_no_reason(bench: Bench) -> None:
    bench.store = Store(bench.redis, Limits(max_attempts=1))
    incarnation = await bench.start()
    (group,) = await bench.fill(1)
    await bench.lease(incarnation, "b1", 1)
    await bench.store.nack(RUN, incarnation, ["b1"])
    await bench.lease(incarnation, "b2", 1)
    assert await bench.redis.hget(START + f"group:{group}", "reason") == b"undeliverable"
    await bench.store.dead.replay(RUN, None)
    assert not await bench.redis.hexists(START + f"group:{group}", "reason")


async def test_a_row_that_was_dropped_while_nobody_held_it_is_not_handed_out_again(bench: Bench) -> None:
    await bench.start()
    (group,) = await bench.ask("env-1", 1)
    await bench.store.abandon(RUN, "env-1")
    assert await bench.store.give_back(RUN, "env-1", group, "too_long")
    assert group not in await bench.ask("env-1", 2)
