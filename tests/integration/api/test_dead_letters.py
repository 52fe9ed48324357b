"""Abandoned groups: dead letters, and tombstones of dropped groups."""

from __future__ import annotations

import pytest
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, trainer
from tests.support.errors import raises

from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import Store


async def test_replayed_dead_letters_return_to_their_place_with_new_attempts(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    a, b, c, d = await harness.fill(4)
    await harness.give_up(incarnation, groups=2)
    (first, second) = await harness.store.dead_letters.all(RUN, 0, 10)
    assert (first.group_id, first.env_id, first.reason, first.attempts) == (a, "env-1", "undeliverable", 3)
    assert (first.sequences, first.bytes) == (2, 100)
    assert [letter.group_id for letter in await harness.store.dead_letters.all(RUN, 1, 1)] == [second.group_id] == [b]
    assert await harness.store.queue.payload(RUN, a) is not None, "a dead letter can be read"
    assert await harness.store.dead_letters.replay(RUN, [a, "g00000099"]) == 1
    assert await harness.store.dead_letters.replay(RUN, [a]) == 0
    assert await harness.whereabouts() == {"ready": [a, c, d], "dead": [b]}
    assert await harness.redis.hmget(f"{PREFIX}group:{a}", "attempts", "reason") == [b"0", None]
    assert await harness.lease(incarnation, "b9", 1) == [a]
    status = await harness.store.runs.status(RUN)
    assert (status.accepted, status.dead, status.bytes) == (3, 1, 400)


async def test_dead_letter_covered_by_a_checkpoint_is_settled_as_trained(harness: StoreHarness) -> None:
    """The trainer trained on the last delivery, and its lease expired before the ack. Replayed, the group would be
    trained twice."""
    incarnation = await harness.start()
    a, b, c, d = await harness.fill(4)
    await harness.give_up(incarnation, groups=1)
    await harness.store.runs.take(RUN, trainer(), [a])
    assert await harness.whereabouts() == {"ready": [b, c, d], "trained": [a]}
    assert await harness.store.dead_letters.replay(RUN, None) == 0
    status = await harness.store.runs.status(RUN)
    assert (status.accepted, status.trained, status.dead, status.bytes) == (4, 1, 0, 300)
    assert (status.sequences["dead"], status.bytes_by_state["dead"]) == (0, 0)


async def test_purged_dead_letters_are_dropped_and_their_bytes_freed(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    a, b, c, d = await harness.fill(4)
    await harness.give_up(incarnation, groups=2)
    assert await harness.store.dead_letters.purge(RUN, None) == 2
    assert await harness.whereabouts() == {"ready": [c, d]}
    audit = await harness.store.runs.audit(RUN)
    assert audit.dropped == {a: "purged", b: "purged"}
    status = await harness.store.runs.status(RUN)
    assert (status.accepted, status.dead, status.bytes, status.dropped) == (2, 0, 200, {"purged": 2})
    with raises(ApiProblem, "permit_lost") as refused:
        await harness.submit("env-1", a)
    assert "(purged)" in refused.value.message


async def test_oldest_dead_letters_are_removed_above_the_limit(harness: StoreHarness) -> None:
    incarnation = await harness.start(groups=1100)
    ids = await harness.fill(1026)
    await harness.give_up(incarnation, groups=1026)
    status = await harness.store.runs.status(RUN)
    assert (status.dead, status.dropped, status.bytes) == (1024, {"dead_letters_full": 2}, 102400)
    assert set((await harness.store.runs.audit(RUN)).dropped) == set(ids[:2])


async def test_tombstones_are_trimmed_and_a_late_retry_is_still_not_stored(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    a, b, _, _ = await harness.fill(4)
    await harness.lease(incarnation, "b1", 2)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    await harness.redis.rpush(PREFIX + "tombs", *(f"x{number}" for number in range(65533)))
    assert not await harness.submit("env-1", a), "a retry is known"
    await harness.lease(incarnation, "b2", 2)
    await harness.store.queue.ack(RUN, incarnation, ["b2"])
    assert await harness.redis.llen(PREFIX + "tombs") == 65536
    with pytest.raises(ApiProblem) as refused:
        await harness.submit("env-1", a)
    assert refused.value.code == "permit_lost"
    assert not await harness.submit("env-1", b)
    assert (await harness.store.runs.status(RUN)).trained == 4, "counts do not depend on tombstones"


async def test_replay_removes_the_dead_letter_reason(harness: StoreHarness) -> None:
    harness.store = Store(harness.redis, Limits(max_attempts=1))
    incarnation = await harness.start()
    (group,) = await harness.fill(1)
    await harness.lease(incarnation, "b1", 1)
    await harness.store.queue.nack(RUN, incarnation, ["b1"])
    await harness.lease(incarnation, "b2", 1)
    assert await harness.redis.hget(PREFIX + f"group:{group}", "reason") == b"undeliverable"
    await harness.store.dead_letters.replay(RUN, None)
    assert not await harness.redis.hexists(PREFIX + f"group:{group}", "reason")


async def test_oldest_tombstones_of_dropped_groups_are_trimmed(harness: StoreHarness) -> None:
    """Tombstones of dropped permits, and of groups that were abandoned after their submit."""
    harness.store = Store(harness.redis, Limits(max_attempts=1))
    incarnation = await harness.start(groups=8)
    a, b, c, d = await harness.ask("env-1", 4)
    await harness.store.permits.return_permit(RUN, "env-1", a, "too_long")
    await harness.submit("env-1", b)
    await harness.lease(incarnation, "b1", 1)
    await harness.store.queue.nack(RUN, incarnation, ["b1"])
    await harness.lease(incarnation, "b2", 1)
    await harness.store.dead_letters.purge(RUN, [b])
    assert await harness.redis.lrange(PREFIX + "tombs", 0, -1) == [a.encode(), b.encode()]
    await harness.redis.rpush(PREFIX + "tombs", *(f"x{number}" for number in range(65_534)))
    await harness.store.permits.return_permit(RUN, "env-1", c, "too_long")
    assert set((await harness.store.runs.audit(RUN)).dropped) == {b, c}
    await harness.store.permits.return_permit(RUN, "env-1", d, "too_long")
    assert set((await harness.store.runs.audit(RUN)).dropped) == {c, d}
    assert (await harness.store.runs.status(RUN)).dropped == {"too_long": 3, "purged": 1}, "counts do not forget"
