"""Groups that wait for the archiver."""

from __future__ import annotations

import time

import pytest
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, trainer
from tests.support.errors import raises

from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import Store, archive, keys
from gristmill_api.store.archive import LeaseLostError


async def test_archived_removes_only_groups_that_wait_for_the_archive(harness: StoreHarness) -> None:
    harness.store = Store(harness.redis, Limits(), archive=True)
    incarnation = await harness.start()
    a, b, c, d = await harness.fill(4)
    await harness.lease(incarnation, "b1", 3)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert await harness.store.archive.head(RUN, 9) == [a, b, c]
    assert await harness.store.archive.acquire()
    token = await harness.redis.get(keys.ARCHIVER)
    assert isinstance(token, bytes)
    assert await harness.store.queue.payload(RUN, b) is not None
    await harness.store.archive.archived(RUN, [a, d, "g00000099"])
    assert await harness.store.archive.head(RUN, 9) == [b, c]
    await harness.store.archive.archived(RUN, [a])
    status = await harness.store.runs.status(RUN)
    assert (status.archiving, status.trained, status.ready, status.bytes) == (2, 3, 1, 300)
    assert [await harness.store.queue.payload(RUN, name) is None for name in (a, b, c, d)] == [
        True,
        False,
        False,
        False,
    ]
    assert await harness.store.scripts.run("archived", PREFIX, token, "1", b, a, d) == [b"OK", 1]
    assert (await harness.store.runs.status(RUN)).archive_lost == 1
    await harness.store.archive.archived(RUN, [a], lost=True)
    assert (await harness.store.runs.status(RUN)).archive_lost == 1, "it was archived before, so it is not lost"
    with pytest.raises(ApiProblem):
        await harness.store.archive.archived("nowhere", [a])
    await harness.store.runs.close(RUN)
    with pytest.raises(ApiProblem) as refused:
        await harness.store.runs.delete(RUN)
    assert refused.value.status == 409
    assert "2 " in refused.value.message, "a trained group, and the fate of the group that was let go"
    await harness.store.archive.archived(RUN, [c])
    await harness.store.archive.fates_written(RUN, 1)
    await harness.store.runs.delete(RUN)
    assert int(await harness.redis.get(keys.BYTES) or 0) == 0
    assert await harness.redis.keys(PREFIX + "*") == [f"{PREFIX}fence".encode()]


async def test_groups_settled_by_a_resumed_trainer_are_archived(harness: StoreHarness) -> None:
    harness.store = Store(harness.redis, Limits(), archive=True)
    incarnation = await harness.start()
    a, b, _, _ = await harness.fill(4)
    await harness.lease(incarnation, "b1", 1)
    await harness.store.runs.take(RUN, trainer(), [a, b])
    assert await harness.store.archive.head(RUN, 9) == [a, b]


async def test_a_process_without_the_archive_lease_removes_neither_groups_nor_fates(harness: StoreHarness) -> None:
    harness.store = Store(harness.redis, Limits(), archive=True)
    paused, successor = harness.store.archive, Store(harness.redis, Limits(), archive=True).archive
    incarnation = await harness.start()
    a, _ = await harness.fill(2)
    await harness.lease(incarnation, "b1", 1)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert await paused.acquire()
    assert paused.is_held()
    await harness.redis.delete(keys.ARCHIVER)  # As if HOLD_S had passed.
    assert await successor.acquire()
    assert not await paused.acquire()
    with raises(LeaseLostError, "archive_lease_lost"):
        await paused.archived(RUN, [a])
    assert not paused.is_held()
    assert await successor.head(RUN, 9) == [a]
    await harness.redis.rpush(keys.fates(RUN), b"one", b"two")
    with raises(LeaseLostError, "archive_lease_lost"):
        await paused.fates_written(RUN, 1)
    await successor.fates_written(RUN, 1)
    assert await successor.fates(RUN, 9) == [b"two"]
    await successor.archived(RUN, [a])
    assert await successor.head(RUN, 9) == []
    await paused.release()
    assert await successor.keep(), "a release by another process leaves the lease"


async def test_the_holder_knows_that_its_lease_is_over_without_asking_redis(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = harness.store.archive
    assert not queue.is_held()
    assert await queue.acquire()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + archive.HOLD_S)
    assert not queue.is_held()
    assert await queue.keep()
    assert queue.is_held()
