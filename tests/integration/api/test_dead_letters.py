"""Dead letters, tombstones, deletion, runs beside each other."""

from __future__ import annotations

import pytest
from tests.integration.api.bench import RUN, Bench, submission, trainer
from tests.support.redis_contents import key_names

from gristmill import MetricsRow
from gristmill_api.errors import Refused
from gristmill_api.settings import Limits
from gristmill_api.store import Amount, Store, keys


async def kill(bench: Bench, incarnation: int, *, groups: int = 1) -> None:
    """Let the first groups run out of attempts."""
    for attempt in range(3):
        await bench.lease(incarnation, f"kill{attempt}", groups)
        await bench.expire_lease(f"kill{attempt}")
    await bench.lease(incarnation, "find", 1000)


async def test_replayed_letters_take_their_place_with_new_attempts(bench: Bench) -> None:
    incarnation = await bench.start()
    a, b, c, d = await bench.fill(4)
    await kill(bench, incarnation, groups=2)
    (first, second) = await bench.store.dead.letters(RUN, 0, 10)
    assert (first.group_id, first.env_id, first.reason, first.attempts) == (a, "env-1", "undeliverable", 3)
    assert (first.sequences, first.bytes) == (2, 100)
    assert [letter.group_id for letter in await bench.store.dead.letters(RUN, 1, 1)] == [second.group_id] == [b]
    assert await bench.store.payload(RUN, a) is not None, "a dead letter can be read"
    assert await bench.store.dead.replay(RUN, [a, "g00000099"]) == 1
    assert await bench.store.dead.replay(RUN, [a]) == 0
    assert await bench.whereabouts() == {"ready": [a, c, d], "dead": [b]}
    assert await bench.lease(incarnation, "b9", 1) == [a]
    status = await bench.store.status(RUN)
    assert (status.accepted, status.dead, status.bytes) == (3, 1, 400)


async def test_a_letter_that_a_checkpoint_covers_is_settled(bench: Bench) -> None:
    """Its last delivery was trained on, and its lease ran out before the ack: replayed, it would be trained twice."""
    incarnation = await bench.start()
    a, b, c, d = await bench.fill(4)
    await kill(bench, incarnation, groups=1)
    await bench.store.take(RUN, trainer(), [a])
    assert await bench.whereabouts() == {"ready": [b, c, d], "trained": [a]}
    assert await bench.store.dead.replay(RUN, None) == 0
    status = await bench.store.status(RUN)
    assert (status.accepted, status.trained, status.dead, status.bytes) == (4, 1, 0, 300)
    assert (status.sequences["dead"], status.bytes_by_state["dead"]) == (0, 0)


async def test_purged_letters_are_dropped_and_their_bytes_go(bench: Bench) -> None:
    incarnation = await bench.start()
    a, b, c, d = await bench.fill(4)
    await kill(bench, incarnation, groups=2)
    assert await bench.store.dead.purge(RUN, None) == 2
    assert await bench.whereabouts() == {"ready": [c, d]}
    audit = await bench.store.audit(RUN)
    assert audit.dropped == {a: "purged", b: "purged"}
    status = await bench.store.status(RUN)
    assert (status.accepted, status.dead, status.bytes, status.dropped) == (2, 0, 200, {"purged": 2})
    with pytest.raises(Refused, match=r"dropped \(purged\)"):
        await bench.submit("env-1", a)


async def test_the_oldest_letters_go_when_there_are_too_many(bench: Bench) -> None:
    incarnation = await bench.start(groups=1100)
    ids = await bench.fill(1026)
    await kill(bench, incarnation, groups=1026)
    status = await bench.store.status(RUN)
    assert (status.dead, status.dropped, status.bytes) == (1024, {"dead_letters_full": 2}, 102400)
    assert set((await bench.store.audit(RUN)).dropped) == set(ids[:2])


async def test_tombstones_are_trimmed_and_a_late_retry_is_still_not_stored(bench: Bench) -> None:
    incarnation = await bench.start()
    a, b, _, _ = await bench.fill(4)
    await bench.lease(incarnation, "b1", 2)
    await bench.store.ack(RUN, incarnation, ["b1"])
    await bench.redis.rpush(keys.prefix(RUN) + "tombs", *(f"x{number}" for number in range(65533)))
    assert not await bench.submit("env-1", a), "a retry is known"
    await bench.lease(incarnation, "b2", 2)
    await bench.store.ack(RUN, incarnation, ["b2"])
    assert await bench.redis.llen(keys.prefix(RUN) + "tombs") == 65536
    with pytest.raises(Refused) as refused:
        await bench.submit("env-1", a)
    assert refused.value.code == "permit_lost"
    assert not await bench.submit("env-1", b)
    assert (await bench.store.status(RUN)).trained == 4, "counts do not depend on tombstones"


async def test_examples_outlive_their_groups(bench: Bench) -> None:
    incarnation = await bench.start(groups=16)
    ids = await bench.fill(10)
    await bench.lease(incarnation, "b1", 9)
    await bench.store.ack(RUN, incarnation, ["b1"])
    latest = await bench.store.journal.examples(RUN, 8)
    assert [group_id for group_id, _ in latest] == list(reversed(ids[2:]))
    assert [body for _, body in latest] == [submission(group_id).body for group_id, _ in latest]
    more = await bench.fill(3)
    assert [group_id for group_id, _ in await bench.store.journal.examples(RUN, 3)] == list(reversed(more))
    kept = await bench.redis.keys(keys.prefix(RUN) + "example:*")
    assert len(kept) == 4, "9 were trained, of which 4 are among the latest 8"


async def test_runs_beside_each_other_do_not_meet(bench: Bench) -> None:
    """The same ids, holders and batch names in two runs of two stacks; one ends and is deleted."""
    incarnation = await bench.start()
    ids = await bench.fill(4)
    other = "run-2"
    await bench.store.create_run(other, {}, 2, stack="second")
    assert (await bench.store.open_run("second")).run_id == other  # type: ignore[union-attr]
    assert (await bench.store.take(other, trainer(), [])).incarnation == incarnation
    await bench.store.record_version(other, incarnation, 0)
    granted = [permit.group_id for permit in (await bench.store.permits(other, "env-1", 4)).permits]
    assert granted == ids
    for group_id in granted:
        assert await bench.store.submit(other, "env-1", submission(group_id, "other"))
    await bench.lease(incarnation, "b1", 2)
    leased = await bench.store.lease(other, incarnation, "b1", Amount("groups", 3))
    assert len(leased.groups) == 3
    await bench.store.ack(other, incarnation, ["b1"])
    assert await bench.whereabouts() == {"leased": ids[:2], "ready": ids[2:]}
    with pytest.raises(Refused) as refused:
        await bench.store.delete_run(other)
    assert refused.value.code == "run_open"
    await bench.store.close_run(other)
    await bench.store.delete_run(other)
    assert await bench.store.open_run("second") is None
    assert [record.run_id for record in await bench.store.runs()] == [RUN]
    assert await bench.redis.keys("*run-2*") == []
    assert int(await bench.redis.get(keys.BYTES) or 0) == 400
    assert (await bench.store.ack(RUN, incarnation, ["b1"])).groups == 2
    with pytest.raises(Refused, match="no run 'run-2'"):
        await bench.store.delete_run(other)


async def test_a_deleted_run_leaves_nothing(bench: Bench) -> None:
    incarnation = await bench.start()
    await bench.store.envs.register(RUN, "env-1", 1.0, None)
    await bench.fill(4)
    await kill(bench, incarnation)
    await bench.lease(incarnation, "b1", 1)
    await bench.lease(incarnation, "b2", 1)
    await bench.store.ack(RUN, incarnation, ["b1"])
    await bench.lease(incarnation, "b3", 1)
    await bench.expire_lease("b3")
    await bench.lease(incarnation, "b4", 9)
    assert await bench.redis.sismember(keys.prefix(RUN) + "expired", "b3")
    await bench.ask("env-1", 1)
    await bench.store.journal.measure(RUN, MetricsRow(source="trainer", step=1, values={"loss": 1.0}))
    await bench.store.close_run(RUN)
    await bench.store.delete_run(RUN)
    assert await key_names(bench.redis) == {keys.BYTES}
    assert int(await bench.redis.get(keys.BYTES) or 0) == 0
    assert (await bench.create()).state == "open", "the id is free again"


async def test_a_run_without_a_stack_stands_in_nobodys_way(bench: Bench) -> None:
    for name in ("a", "b"):
        _, new = await bench.store.create_run(name, {}, 2, stack=None)
        assert new
    assert (await bench.store.open_run()).run_id == RUN  # type: ignore[union-attr]
    with pytest.raises(Refused, match="stack: None -> 'default'"):
        await bench.store.create_run("a", {}, 2)
    await bench.store.close_run("a")
    assert (await bench.store.open_run()).run_id == RUN  # type: ignore[union-attr]


async def test_a_runs_caps_hold(bench: Bench) -> None:
    incarnation = await bench.start()
    a, b, c, d = await bench.ask("env-1", 4)
    bench.store = Store(bench.redis, Limits(max_run_bytes=250))
    await bench.submit("env-1", a)
    await bench.submit("env-1", b)
    with pytest.raises(Refused, match="run 'run-1' holds 2 groups of 200 bytes") as refused:
        await bench.submit("env-1", c)
    assert (refused.value.status, refused.value.headers()) == (429, {"Retry-After": "2"})
    bench.store = Store(bench.redis, Limits(max_run_groups=2))
    with pytest.raises(Refused, match="API_MAX_RUN_GROUPS"):
        await bench.submit("env-1", c)
    await bench.lease(incarnation, "b1", 1)
    with pytest.raises(Refused):
        await bench.submit("env-1", c)
    await bench.store.ack(RUN, incarnation, ["b1"])
    assert await bench.submit("env-1", c)
    assert (await bench.whereabouts())["outstanding"] == [d]
