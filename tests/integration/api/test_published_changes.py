"""Notifications and events of each change: each verb wakes its waiters and writes its events, and a retry publishes
nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.integration.api.event_listener import NOTHING, EventListener, Recorded
from tests.integration.api.store_harness import RUN, StoreHarness, trainer

from gristmill import MetricsRow
from gristmill_api.settings import Limits
from gristmill_api.store import Store, keys

READY, PERMITS, ARCHIVE = (f"{topic} {keys.prefix(RUN)}" for topic in ("ready", "permits", "archive"))


@pytest.fixture
async def listener(harness: StoreHarness) -> AsyncIterator[EventListener]:
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    yield listener
    await listener.close()


async def test_run_changes_wake_waiters_and_write_events(harness: StoreHarness, listener: EventListener) -> None:
    store = harness.store
    assert await listener.recorded(harness.create()) == NOTHING, "it was there"
    await store.runs.create("other", {}, 2, stack=None)
    assert (await listener.recorded())[0] == {"open", f"events {keys.prefix('other')}"}
    other: Any = await harness.redis.xrange(keys.prefix("other") + "events")
    assert [fields for _, fields in other] == [{b"kind": b"open"}]
    assert await listener.recorded(store.runs.take(RUN, trainer(), [])) == (
        {READY, PERMITS},
        [{"kind": "take", "incarnation": "1"}],
    )
    published = ({PERMITS}, [{"kind": "version", "version": "1.3"}])
    assert await listener.recorded(store.runs.record_version(RUN, 1, 3)) == published
    assert await listener.recorded(store.runs.finish(RUN, 1)) == ({READY, PERMITS}, [{"kind": "finish"}])
    assert await listener.recorded(store.runs.finish(RUN, 1)) == NOTHING
    await store.runs.delete(RUN)
    assert await harness.redis.keys(keys.prefix(RUN) + "*") == [f"{keys.prefix(RUN)}fence".encode()]


async def test_run_deletion_wakes_all_waiters(harness: StoreHarness) -> None:
    await harness.store.runs.close(RUN)
    async with harness.redis.pubsub(ignore_subscribe_messages=True) as subscription:
        await subscription.subscribe(keys.EVENTS)
        await subscription.get_message(timeout=5)
        await harness.store.runs.delete(RUN)
        told = [await subscription.get_message(timeout=5) for _ in range(2)]
    assert {message["data"].decode() for message in told if message} == {READY, PERMITS}


async def test_permits_and_submits_wake_waiters_and_write_events(
    harness: StoreHarness, listener: EventListener
) -> None:
    await harness.start()
    await listener.recorded()
    assert await listener.recorded(harness.ask("env-1", 4)) == NOTHING
    a, b, c = (f"g{row:08d}" for row in range(3))
    assert await listener.recorded(harness.store.permits.renew(RUN, "env-1", None)) == NOTHING
    submitted = {"kind": "submit", "group": a, "env": "env-1", "sequences": "2", "tokens": "10"}
    assert await listener.recorded(harness.submit("env-1", a)) == ({READY}, [submitted])
    assert await listener.recorded(harness.submit("env-1", a)) == NOTHING
    dropped = ({PERMITS}, [{"kind": "drop", "group": b, "reason": "too_long"}])
    assert await listener.recorded(harness.store.permits.return_permit(RUN, "env-1", b, "too_long")) == dropped
    assert await listener.recorded(harness.store.permits.return_permit(RUN, "env-1", b, "too_long")) == NOTHING
    assert await listener.recorded(harness.store.permits.return_permit(RUN, "env-1", c, "abandoned")) == ({PERMITS}, [])
    assert await listener.recorded(harness.store.permits.release_all(RUN, "env-2")) == NOTHING
    assert await listener.recorded(harness.store.permits.release_all(RUN, "env-1")) == ({PERMITS}, [])


async def test_batch_changes_wake_waiters_and_write_events(harness: StoreHarness, listener: EventListener) -> None:
    incarnation = await harness.start()
    ids = await harness.fill(4)
    store = harness.store
    await listener.recorded()
    leased: Recorded = (set(), [{"kind": "lease", "batch": "b1", "groups": "2"}])
    assert await listener.recorded(harness.lease(incarnation, "b1", 2)) == leased
    assert await listener.recorded(harness.lease(incarnation, "b1", 2)) == NOTHING
    assert await listener.recorded(harness.lease(incarnation, "b2", 3)) == NOTHING
    assert await listener.recorded(store.queue.extend(RUN, incarnation, ["b1"])) == NOTHING
    given_back = ({READY}, [{"kind": "nack", "batch": "b1", "groups": "2"}])
    assert await listener.recorded(store.queue.nack(RUN, incarnation, ["b1"])) == given_back
    assert await listener.recorded(store.queue.nack(RUN, incarnation, ["b1"])) == NOTHING
    await harness.lease(incarnation, "b3", 1)
    await harness.expire_lease("b3")
    await listener.recorded()
    again = [{"kind": "expire", "batch": "b3"}, {"kind": "lease", "batch": "b4", "groups": "4"}]
    assert await listener.recorded(harness.lease(incarnation, "b4", 4)) == (set(), again)
    acked: Recorded = (set(), [{"kind": "ack", "batch": "b4", "groups": "4"}])
    assert await listener.recorded(store.queue.ack(RUN, incarnation, ["b4"])) == acked
    assert await listener.recorded(store.queue.ack(RUN, incarnation, ["b4"])) == NOTHING
    assert (await store.runs.audit(RUN)).trained == ids


async def test_returned_batch_of_one_group_writes_one_event(harness: StoreHarness, listener: EventListener) -> None:
    incarnation = await harness.start()
    await harness.fill(1)
    await harness.lease(incarnation, "b1", 1)
    await listener.recorded()
    told = ({READY}, [{"kind": "nack", "batch": "b1", "groups": "1"}])
    assert await listener.recorded(harness.store.queue.nack(RUN, incarnation, ["b1"])) == told


async def test_dead_groups_wake_waiters_and_write_events(harness: StoreHarness, listener: EventListener) -> None:
    harness.store = Store(harness.redis, Limits(max_attempts=1))
    incarnation = await harness.start(staleness=3, groups=1)
    a, b, _ = await harness.fill(3)
    await harness.lease(incarnation, "b1", 2)
    await harness.store.queue.nack(RUN, incarnation, ["b1"])
    await listener.recorded()
    died = [{"kind": "dead", "group": name, "reason": "undeliverable"} for name in (a, b)]
    assert await listener.recorded(harness.lease(incarnation, "b2", 3)) == ({PERMITS}, died)
    assert await listener.recorded(harness.store.dead_letters.replay(RUN, [a])) == (
        {READY},
        [{"kind": "replay", "group": a}],
    )
    assert await listener.recorded(harness.store.dead_letters.replay(RUN, [a])) == NOTHING
    purged = ({PERMITS}, [{"kind": "drop", "group": b, "reason": "purged"}])
    assert await listener.recorded(harness.store.dead_letters.purge(RUN, None)) == purged
    assert await listener.recorded(harness.store.dead_letters.purge(RUN, None)) == NOTHING


async def test_environment_and_metrics_changes_write_events(harness: StoreHarness, listener: EventListener) -> None:
    envs = harness.store.envs
    assert await listener.recorded(envs.register(RUN, "env-1", None)) == (set(), [{"kind": "env", "env": "env-1"}])
    assert await listener.recorded(envs.register(RUN, "env-1", 1.0)) == NOTHING
    assert await listener.recorded(envs.heartbeat(RUN, "env-1")) == NOTHING
    assert await listener.recorded(envs.unregister(RUN, "env-1")) == ({PERMITS}, [])
    assert await listener.recorded(envs.unregister(RUN, "env-1")) == NOTHING
    row = MetricsRow(source="trainer", step=3, values={"loss": 0.5})
    topics, (event,) = await listener.recorded(harness.store.journal.record_metrics(RUN, row))
    assert topics == set()
    assert event["kind"] == "metrics"
    assert (event["source"], event["step"]) == ("trainer", "3")


async def test_archiver_is_notified_of_groups_that_wait_for_it(harness: StoreHarness, listener: EventListener) -> None:
    harness.store = Store(harness.redis, Limits(), archive=True)
    incarnation = await harness.start()
    a, *_ = await harness.fill(4)
    await harness.lease(incarnation, "b1", 1)
    await listener.recorded()
    topics, _ = await listener.recorded(harness.store.queue.ack(RUN, incarnation, ["b1"]))
    assert topics == {ARCHIVE}
    topics, _ = await listener.recorded(harness.store.runs.take(RUN, trainer(), []))
    assert topics == {ARCHIVE, READY, PERMITS}
    assert await harness.redis.lrange(keys.prefix(RUN) + "archive", 0, -1) == [a.encode()]


async def test_event_stream_is_trimmed_to_the_newest_events(harness: StoreHarness) -> None:
    """About 1024 events; Redis trims whole nodes of 100."""
    harness.store = Store(harness.redis, Limits(max_attempts=1000))
    await harness.start()
    await harness.fill(1)
    for _ in range(600):
        await harness.lease(1, "b", 1)
        await harness.store.queue.nack(RUN, 1, ["b"])
    kept = await harness.redis.xlen(keys.prefix(RUN) + "events")
    assert 1024 <= kept <= 1124
