"""Lease, extend and ack, with leases that expire before, between and after these calls."""

from __future__ import annotations

import pytest
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, submission

from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import LeaseSize, Store


async def test_lease_returns_whole_batches_in_submit_order(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    ids = await harness.ask("env-1", 4)
    for group in (ids[2], ids[0], ids[3]):
        await harness.submit("env-1", group)
    assert await harness.lease(incarnation, "b1", 4) is None
    assert await harness.whereabouts() == {"ready": [ids[2], ids[0], ids[3]], "outstanding": [ids[1]]}
    batch = await harness.store.queue.lease(RUN, incarnation, "b1", LeaseSize("groups", 2))
    assert [(leased.group_id, leased.size) for leased in batch.groups] == [(ids[2], 100), (ids[0], 100)]
    assert await harness.store.queue.payload(RUN, ids[2]) == f"{ids[2]}/a/".encode().ljust(100, b".")


async def test_a_retried_lease_is_the_same_batch(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    ids = await harness.fill(4)
    first = await harness.lease(incarnation, "b1", 2)
    assert await harness.lease(incarnation, "b1", 2) == first == ids[:2]
    await harness.expire_lease("b1")
    assert await harness.lease(incarnation, "b1", 2) == first, "the lease expired, but no call has found it yet"
    await harness.expire_lease("b1")
    assert await harness.lease(incarnation, "b2", 9) is None  # returns b1's groups to the queue
    assert (await harness.whereabouts())["ready"] == ids
    assert await harness.lease(incarnation, "b1", 2) == first, "put back, but no trainer took them"
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    with pytest.raises(ApiProblem) as refused:
        await harness.lease(incarnation, "b1", 2)
    assert refused.value.code == "batch_acked"


async def test_expired_groups_return_to_their_place(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    a, b, c, d = await harness.fill(4)
    await harness.lease(incarnation, "b1", 1)
    await harness.lease(incarnation, "b2", 1)
    await harness.expire_lease("b1")
    assert await harness.lease(incarnation, "b3", 2) == [a, c]
    await harness.expire_lease("b2")
    await harness.expire_lease("b3")
    assert await harness.lease(incarnation, "b4", 4) == [a, b, c, d]


async def test_ack_is_counted_once(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    ids = await harness.fill(4)
    await harness.lease(incarnation, "b1", 2)
    await harness.lease(incarnation, "b2", 1)
    done = await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert (done.batches, done.groups, done.already, done.lost) == (1, 2, 0, [])
    done = await harness.store.queue.ack(RUN, incarnation, ["b1", "b2"])
    assert (done.batches, done.groups, done.already, done.lost) == (1, 1, 1, [])
    assert await harness.whereabouts() == {"ready": ids[3:], "trained": ids[:3]}
    status = await harness.store.runs.status(RUN)
    assert (status.trained, status.accepted, status.bytes) == (3, 4, 100)


async def test_late_ack_counts_unless_the_groups_were_leased_again(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    a, b, c, d = await harness.fill(4)
    await harness.lease(incarnation, "b1", 1)
    await harness.lease(incarnation, "b2", 2)
    await harness.expire_lease("b1")
    await harness.expire_lease("b2")
    assert await harness.lease(incarnation, "b3", 1) == [a]  # b1's only group; b2's groups are back, unchanged
    done = await harness.store.queue.ack(RUN, incarnation, ["b1", "b2", "never"])
    assert (done.lost, done.groups) == (["b1", "never"], 2)
    assert await harness.whereabouts() == {"ready": [d], "leased": [a], "trained": [b, c]}
    # The old holder's attempt does not affect the new holder's ack.
    assert (await harness.store.queue.ack(RUN, incarnation, ["b3"])).groups == 1


async def test_batch_is_lost_if_one_of_its_groups_was_leased_again(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    a, b, c, d = await harness.fill(4)
    await harness.lease(incarnation, "b1", 2)
    await harness.expire_lease("b1")
    await harness.lease(incarnation, "b2", 1)
    assert (await harness.store.queue.ack(RUN, incarnation, ["b1"])).lost == ["b1"]
    assert await harness.store.queue.extend(RUN, incarnation, ["b1"]) == ["b1"]
    assert await harness.whereabouts() == {"ready": [b, c, d], "leased": [a]}
    # A lost name that is used again is a new batch.
    assert await harness.lease(incarnation, "b1", 1) == [b]
    await harness.expire_lease("b1")
    assert await harness.lease(incarnation, "b3", 9) is None
    assert (await harness.store.queue.ack(RUN, incarnation, ["b1"])).groups == 1


async def test_extend_keeps_a_lease_and_revives_an_expired_one(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    ids = await harness.fill(4)
    await harness.lease(incarnation, "b1", 2)
    await harness.expire_lease("b1")
    assert await harness.store.queue.extend(RUN, incarnation, ["b1", "b9"]) == ["b9"]
    assert await harness.lease(incarnation, "b2", 3) is None
    await harness.expire_lease("b1")
    assert await harness.lease(incarnation, "b2", 9) is None
    assert await harness.store.queue.extend(RUN, incarnation, ["b1"]) == []
    assert await harness.whereabouts() == {"ready": ids[2:], "leased": ids[:2]}
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert await harness.store.queue.extend(RUN, incarnation, ["b1"]) == [], "acked meanwhile is not lost"


async def test_group_that_is_never_acked_becomes_a_dead_letter_and_frees_its_capacity(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    a, b, c, d = await harness.fill(4)
    for attempt in range(3):
        assert await harness.lease(incarnation, f"b{attempt}", 1) == [a]
        await harness.expire_lease(f"b{attempt}")
    assert await harness.ask("env-1", 1) == []
    assert await harness.lease(incarnation, "next", 3) == [b, c, d]
    assert await harness.whereabouts() == {"leased": [b, c, d], "dead": [a]}
    status = await harness.store.runs.status(RUN)
    assert (status.dead, status.accepted, status.bytes) == (1, 3, 400)
    assert (await harness.store.queue.ack(RUN, incarnation, ["b2"])).lost == ["b2"]
    assert await harness.ask("env-1", 9) == ["g00000004"], "training needs a group instead of the dead one"


async def test_returned_batch_is_ready_at_once_in_its_place(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    ids = await harness.fill(4)
    await harness.lease(incarnation, "b1", 2)
    assert await harness.store.queue.nack(RUN, incarnation, ["b1", "never"]) == 2
    assert await harness.store.queue.nack(RUN, incarnation, ["b1"]) == 0, "a retry"
    assert await harness.whereabouts() == {"ready": ids}
    assert (await harness.store.queue.ack(RUN, incarnation, ["b1"])).lost == ["b1"]
    assert await harness.lease(incarnation, "b2", 4) == ids
    assert (await harness.store.runs.status(RUN)).redeliveries == 2


async def test_fenced_trainer_cannot_return_a_batch(harness: StoreHarness) -> None:
    old = await harness.start()
    new = await harness.start()
    await harness.fill(1)
    await harness.lease(new, "b1", 1)
    with pytest.raises(ApiProblem) as refused:
        await harness.store.queue.nack(RUN, old, ["b1"])
    assert refused.value.code == "fenced"
    assert (await harness.store.runs.status(RUN)).leased == 1


async def test_lease_returns_sizes_and_schema_of_its_groups(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    (name,) = await harness.ask("env-1", 1)
    await harness.store.queue.submit(RUN, "env-1", submission(name))
    for _ in range(2):  # and so does the retry
        (leased,) = (await harness.store.queue.lease(RUN, incarnation, "b1", LeaseSize("groups", 1))).groups
        assert (leased.group_id, leased.size) == (name, 100)


async def test_lease_reports_how_many_groups_became_dead_letters(harness: StoreHarness) -> None:
    harness.store = Store(harness.redis, Limits(max_attempts=1))
    incarnation = await harness.start()
    *_, last = await harness.fill(3)
    await harness.lease(incarnation, "b1", 2)
    await harness.store.queue.nack(RUN, incarnation, ["b1"])
    batch = await harness.store.queue.lease(RUN, incarnation, "b2", LeaseSize("groups", 1))
    assert ([group.group_id for group in batch.groups], batch.dead) == ([last], 2)


async def test_acked_batch_names_are_kept_up_to_a_bound(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    await harness.redis.zadd(PREFIX + "acked", {f"old{number}": number for number in range(5000)})
    await harness.fill(1)
    await harness.lease(incarnation, "b1", 1)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert await harness.redis.zcard(PREFIX + "acked") == 4096
    assert await harness.redis.zscore(PREFIX + "acked", "b1") is not None, "the newest stay"


async def test_repeated_late_ack_counts_once(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    await harness.fill(1)
    await harness.lease(incarnation, "b1", 1)
    await harness.expire_lease("b1")
    assert await harness.lease(incarnation, "b2", 2) is None
    done = await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert (done.batches, done.groups, done.already) == (1, 1, 0)
    done = await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert (done.batches, done.groups, done.already) == (0, 0, 1)


async def test_reused_batch_name_is_independent_of_its_old_groups(harness: StoreHarness) -> None:
    harness.store = Store(harness.redis, Limits(max_attempts=1))
    incarnation = await harness.start()
    a, b, c, d = await harness.fill(4)
    assert await harness.lease(incarnation, "b1", 2) == [a, b]
    await harness.store.queue.nack(RUN, incarnation, ["b1"])
    assert await harness.lease(incarnation, "b1", 2) == [c, d], "the first two are dead now"
    await harness.expire_lease("b1")
    await harness.store.dead_letters.replay(RUN, None)
    assert await harness.lease(incarnation, "b2", 2) == [a, b]
    assert (await harness.store.queue.ack(RUN, incarnation, ["b1"])).groups == 2, "no trainer holds c and d"
    assert await harness.whereabouts() == {"leased": [a, b], "trained": [c, d]}


async def test_a_batch_of_which_a_group_was_dropped_cannot_be_acked(harness: StoreHarness) -> None:
    harness.store = Store(harness.redis, Limits(max_attempts=1))
    incarnation = await harness.start()
    ids = await harness.fill(2)
    await harness.lease(incarnation, "b1", 2)
    await harness.expire_lease("b1")
    assert await harness.lease(incarnation, "b2", 1) is None
    assert await harness.store.dead_letters.purge(RUN, None) == 2
    assert (await harness.store.queue.ack(RUN, incarnation, ["b1"])).lost == ["b1"]
    assert (await harness.store.runs.audit(RUN)).dropped == dict.fromkeys(ids, "purged")
