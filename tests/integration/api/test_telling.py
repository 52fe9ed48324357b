"""Notifications and events of each change: each verb wakes its waiters and writes its events, and a retry publishes
nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.integration.api.bench import RUN, Bench, trainer
from tests.integration.api.ear import NOTHING, Ear, Told

from gristmill import MetricsRow
from gristmill_api.settings import Limits
from gristmill_api.store import LeaseSize, Store, keys

READY, PERMITS, ARCHIVE = (f"{topic} {keys.prefix(RUN)}" for topic in ("ready", "permits", "archive"))


@pytest.fixture
async def ear(bench: Bench) -> AsyncIterator[Ear]:
    ear = Ear(bench.redis, RUN)
    await ear.open()
    yield ear
    await ear.close()


async def test_opening_taking_publishing_ending(bench: Bench, ear: Ear) -> None:
    store = bench.store
    assert await ear.hear(bench.create()) == NOTHING, "it was there"
    await store.runs.create("other", {}, 2, stack=None)
    assert (await ear.hear())[0] == {"open", f"events {keys.prefix('other')}"}
    other: Any = await bench.redis.xrange(keys.prefix("other") + "events")
    assert [fields for _, fields in other] == [{b"kind": b"open"}]
    assert await ear.hear(store.runs.take(RUN, trainer(), [])) == (
        {READY, PERMITS},
        [{"kind": "take", "incarnation": "1"}],
    )
    published = ({PERMITS}, [{"kind": "version", "version": "1.3"}])
    assert await ear.hear(store.runs.record_version(RUN, 1, 3)) == published
    assert await ear.hear(store.runs.finish(RUN, 1)) == ({READY, PERMITS}, [{"kind": "finish"}])
    assert await ear.hear(store.runs.finish(RUN, 1)) == NOTHING
    await store.runs.delete(RUN)
    assert await bench.redis.keys(keys.prefix(RUN) + "*") == [f"{keys.prefix(RUN)}fence".encode()]


async def test_deleting_wakes_all_who_wait(bench: Bench) -> None:
    await bench.store.runs.close(RUN)
    async with bench.redis.pubsub(ignore_subscribe_messages=True) as subscription:
        await subscription.subscribe(keys.EVENTS)
        await subscription.get_message(timeout=5)
        await bench.store.runs.delete(RUN)
        told = [await subscription.get_message(timeout=5) for _ in range(2)]
    assert {message["data"].decode() for message in told if message} == {READY, PERMITS}


async def test_permits_and_submits(bench: Bench, ear: Ear) -> None:
    await bench.start()
    await ear.hear()
    assert await ear.hear(bench.ask("env-1", 4)) == NOTHING
    a, b, c = (f"g{row:08d}" for row in range(3))
    assert await ear.hear(bench.store.permits.renew(RUN, "env-1", None)) == NOTHING
    submitted = {"kind": "submit", "group": a, "env": "env-1", "sequences": "2", "tokens": "10"}
    assert await ear.hear(bench.submit("env-1", a)) == ({READY}, [submitted])
    assert await ear.hear(bench.submit("env-1", a)) == NOTHING
    dropped = ({PERMITS}, [{"kind": "drop", "group": b, "reason": "too_long"}])
    assert await ear.hear(bench.store.permits.return_permit(RUN, "env-1", b, "too_long")) == dropped
    assert await ear.hear(bench.store.permits.return_permit(RUN, "env-1", b, "too_long")) == NOTHING
    assert await ear.hear(bench.store.permits.return_permit(RUN, "env-1", c, "abandoned")) == ({PERMITS}, [])
    assert await ear.hear(bench.store.permits.release_all(RUN, "env-2")) == NOTHING
    assert await ear.hear(bench.store.permits.release_all(RUN, "env-1")) == ({PERMITS}, [])


async def test_batches(bench: Bench, ear: Ear) -> None:
    incarnation = await bench.start()
    ids = await bench.fill(4)
    store = bench.store
    await ear.hear()
    leased: Told = (set(), [{"kind": "lease", "batch": "b1", "groups": "2"}])
    assert await ear.hear(bench.lease(incarnation, "b1", 2)) == leased
    assert await ear.hear(bench.lease(incarnation, "b1", 2)) == NOTHING
    assert await ear.hear(bench.lease(incarnation, "b2", 3)) == NOTHING
    assert await ear.hear(store.queue.extend(RUN, incarnation, ["b1"])) == NOTHING
    given_back = ({READY}, [{"kind": "nack", "batch": "b1", "groups": "2"}])
    assert await ear.hear(store.queue.nack(RUN, incarnation, ["b1"])) == given_back
    assert await ear.hear(store.queue.nack(RUN, incarnation, ["b1"])) == NOTHING
    await bench.lease(incarnation, "b3", 1)
    await bench.expire_lease("b3")
    await ear.hear()
    again = [{"kind": "expire", "batch": "b3"}, {"kind": "lease", "batch": "b4", "groups": "4"}]
    assert await ear.hear(bench.lease(incarnation, "b4", 4)) == (set(), again)
    acked: Told = (set(), [{"kind": "ack", "batch": "b4", "groups": "4"}])
    assert await ear.hear(store.queue.ack(RUN, incarnation, ["b4"])) == acked
    assert await ear.hear(store.queue.ack(RUN, incarnation, ["b4"])) == NOTHING
    assert (await store.runs.audit(RUN)).trained == ids


async def test_a_batch_of_one_group_given_back(bench: Bench, ear: Ear) -> None:
    incarnation = await bench.start()
    await bench.fill(1)
    await bench.lease(incarnation, "b1", 1)
    await ear.hear()
    told = ({READY}, [{"kind": "nack", "batch": "b1", "groups": "1"}])
    assert await ear.hear(bench.store.queue.nack(RUN, incarnation, ["b1"])) == told


async def test_groups_that_are_given_up(bench: Bench, ear: Ear) -> None:
    bench.store = Store(bench.redis, Limits(max_attempts=1))
    incarnation = await bench.start(staleness=3, groups=1)
    a, b, _ = await bench.fill(3)
    await bench.lease(incarnation, "b1", 2)
    await bench.store.queue.nack(RUN, incarnation, ["b1"])
    await ear.hear()
    died = [{"kind": "dead", "group": name, "reason": "undeliverable"} for name in (a, b)]
    assert await ear.hear(bench.lease(incarnation, "b2", 9)) == ({PERMITS}, died)
    assert await ear.hear(bench.store.dead_letters.replay(RUN, [a])) == ({READY}, [{"kind": "replay", "group": a}])
    assert await ear.hear(bench.store.dead_letters.replay(RUN, [a])) == NOTHING
    purged = ({PERMITS}, [{"kind": "drop", "group": b, "reason": "purged"}])
    assert await ear.hear(bench.store.dead_letters.purge(RUN, None)) == purged
    assert await ear.hear(bench.store.dead_letters.purge(RUN, None)) == NOTHING
    await bench.store.runs.record_version(RUN, incarnation, 3)
    await ear.hear()
    stale = bench.store.queue.lease(RUN, incarnation, "b3", LeaseSize("groups", 9), max_staleness=2)
    topics, events = await ear.hear(stale)
    assert topics == {PERMITS}
    assert [(event["kind"], event["reason"]) for event in events] == [("drop", "stale")] * 2


async def test_environments_and_metrics(bench: Bench, ear: Ear) -> None:
    envs = bench.store.envs
    assert await ear.hear(envs.register(RUN, "env-1", None, 0.5)) == (set(), [{"kind": "env", "env": "env-1"}])
    assert await ear.hear(envs.register(RUN, "env-1", 1.0, None)) == NOTHING
    assert await ear.hear(envs.heartbeat(RUN, "env-1")) == NOTHING
    assert await ear.hear(envs.unregister(RUN, "env-1")) == ({READY, PERMITS}, [])
    assert await ear.hear(envs.unregister(RUN, "env-1")) == NOTHING
    row = MetricsRow(source="trainer", step=3, values={"loss": 0.5})
    topics, (event,) = await ear.hear(bench.store.journal.record_metrics(RUN, row))
    assert topics == set()
    assert event["kind"] == "metrics"
    assert (event["source"], event["step"]) == ("trainer", "3")


async def test_the_archiver_is_told_of_what_waits_for_it(bench: Bench, ear: Ear) -> None:
    bench.store = Store(bench.redis, Limits(), archive=True)
    incarnation = await bench.start()
    a, *_ = await bench.fill(4)
    await bench.lease(incarnation, "b1", 1)
    await ear.hear()
    topics, _ = await ear.hear(bench.store.queue.ack(RUN, incarnation, ["b1"]))
    assert topics == {ARCHIVE}
    topics, _ = await ear.hear(bench.store.runs.take(RUN, trainer(), []))
    assert topics == {ARCHIVE, READY, PERMITS}
    assert await bench.redis.lrange(keys.prefix(RUN) + "archive", 0, -1) == [a.encode()]


async def test_the_stream_forgets_what_is_old(bench: Bench) -> None:
    """About 1024 events; Redis trims whole nodes of 100."""
    bench.store = Store(bench.redis, Limits(max_attempts=1000))
    await bench.start()
    await bench.fill(1)
    for _ in range(600):
        await bench.lease(1, "b", 1)
        await bench.store.queue.nack(RUN, 1, ["b"])
    kept = await bench.redis.xlen(keys.prefix(RUN) + "events")
    assert 1024 <= kept <= 1124
