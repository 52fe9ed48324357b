"""The queue behind the Atropos compatibility endpoints: registrations, batches that are being sent, restarts."""

from __future__ import annotations

import asyncio
import time

import pytest
from redis.asyncio import Redis
from tests.integration.api.event_listener import NOTHING, EventListener, Recorded
from tests.integration.atropos_queue.store_harness import RUN, START, StoreHarness, names, registration, scored
from tests.support.errors import raises

from gristmill_api.atropos import queue
from gristmill_api.atropos.messages import RegisterEnv
from gristmill_api.atropos.queue import Queue
from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import keys


def told(kind: str, **fields: object) -> dict[str, str]:
    return {"kind": kind, **{name: str(value) for name, value in fields.items()}}


async def test_the_first_trainer_says_what_the_run_is(harness: StoreHarness) -> None:
    assert await harness.queue.trainer() is None
    assert await harness.queue.lease("b") is None, "no trainer registered, and no run exists"
    await harness.queue.register(registration(batch_size=8, starting_step=3))
    record = await harness.store.runs.record(RUN)
    assert (record.protocol, record.stack) == ("atropos", None)
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    assert await listener.recorded(harness.queue.register(registration(batch_size=99))) == NOTHING
    await harness.submit(scored(), scored())
    trainer = await harness.queue.trainer()
    assert trainer is not None
    assert (trainer.step, trainer.queued, trainer.registration["batch_size"]) == (3, 2, "8")
    assert trainer.registration["wandb_project"] == "p"
    await harness.queue.reset()
    assert await harness.queue.lease("b") is None, "a run exists, and no trainer registered"
    await listener.recorded()
    assert await listener.recorded(harness.queue.register(registration())) == (set(), [told("register")])
    await listener.close()


async def test_only_an_open_run_of_this_protocol_is_written_to(redis_url: str) -> None:
    env = RegisterEnv(max_token_length=1, desired_name="e", weight=1, group_size=1)
    async with Redis.from_url(redis_url) as client:
        harness = StoreHarness(client)
        calls = (
            lambda: harness.queue.register(registration()),
            lambda: harness.queue.register_env(env),
            lambda: harness.submit(scored()),
        )
        await harness.store.runs.create(RUN, {}, 2, stack=None)
        for call in calls:
            with raises(ApiProblem, "not_atropos") as refused:
                await call()
            assert refused.value.status == 409
        await client.flushall()
        await harness.queue.register(registration())
        await harness.store.runs.close(RUN)
        for call in calls:
            with raises(ApiProblem, "finished"):
                await call()
        assert await harness.ready() == []


async def test_environments_come_after_the_first_request_for_a_batch(harness: StoreHarness) -> None:
    await harness.queue.register(registration(batch_size=8, starting_step=2))
    facts = RegisterEnv(max_token_length=64, desired_name="e", weight=0.5, group_size=4, min_batch_allocation=0.25)
    assert await harness.queue.register_env(facts) is None
    assert await harness.lend("b") is None
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    first = await harness.queue.register_env(facts)
    assert first is not None
    assert (first.number, first.namesakes, first.trainer["batch_size"], first.trainer["step"]) == (0, 0, "8", "2")
    assert await listener.recorded() == (set(), [told("register_env", env=0, name="e")])
    await listener.close()
    assert await harness.env(group_size=2, name="other") == 1
    again = await harness.queue.register_env(facts)
    assert again is not None
    assert (again.number, again.namesakes) == (2, 1)
    view = await harness.queue.env(0)
    assert view is not None
    assert (view.step, view.batch_size, view.group_size, view.shares) == (2, 8, 4, {"0": 0.25, "2": 0.25})
    assert (view.own.max_context_len, view.own.weight, len(view.connected)) == (64, 0.5, 3)
    assert await harness.queue.env(3) is None


async def test_environments_of_both_protocols_are_in_one_registry(harness: StoreHarness) -> None:
    await harness.start()
    here, gone = await harness.env(share=0.25), await harness.env()
    await harness.queue.disconnect(gone)
    found = {env.env_id: (env.weight, env.min_batch_allocation, env.alive) for env in await harness.store.envs.all(RUN)}
    assert found == {str(here): (1.0, 0.25, True), str(gone): (1.0, None, False)}
    assert (await harness.store.runs.status(RUN)).envs == 1
    with raises(ApiProblem, "no_permits"):
        await harness.store.envs.register(RUN, str(here), 2.0, None)
    with raises(ApiProblem, "env_missing"):
        await harness.store.envs.heartbeat(RUN, str(here))
    assert not await harness.store.envs.unregister(RUN, str(here))
    view = await harness.queue.env(here)
    assert view is not None
    assert view.own.weight == 1.0


async def test_an_environment_of_v1_with_a_number_for_a_name_is_unknown_to_atropos_protocol(
    harness: StoreHarness,
) -> None:
    await harness.store.runs.create(RUN, {}, 2, stack=None)
    await harness.store.envs.register(RUN, "0", 1.0, None)
    assert not await harness.queue.disconnect(0)
    assert await harness.queue.env(0) is None
    assert [env.alive for env in await harness.store.envs.all(RUN)] == [True]


async def test_living_environments_of_atropos_protocol_do_not_keep_a_run_from_being_replaced(
    harness: StoreHarness,
) -> None:
    await harness.start()
    await harness.env()
    with raises(ApiProblem, "config_differs") as refused:
        await harness.store.runs.create(RUN, {}, 2, stack=None)
    assert refused.value.retry_after is None, "it is never replaced, whether environments are alive or not"


async def test_environments_of_an_older_api_version_are_moved_to_the_registry(harness: StoreHarness) -> None:
    await harness.start()
    now_ms = int(time.time() * 1000)
    old = START + "atropos:"
    await harness.redis.hset(old + "envs", mapping={"0": "[64, 0.1]", "1": "[32, 1.0]"})
    await harness.redis.hset(old + "group_sizes", mapping={"0": 4, "1": 2})
    await harness.redis.hset(old + "minima", "0", "0.25")
    await harness.redis.sadd(old + "disconnected", 1)
    await harness.redis.zadd(old + "heard", {"0": now_ms, "1": now_ms})
    for _ in range(2):
        await harness.store.runs.index()
        view = await harness.queue.env(0)
        assert view is not None
        assert (view.own.max_context_len, view.own.weight, view.group_size) == (64, 0.1, 4)
        assert (view.shares, len(view.connected)) == ({"0": 0.25}, 1)
    view = await harness.queue.env(1)
    assert view is not None
    assert (view.own.max_context_len, view.group_size, len(view.connected)) == (32, 2, 1)
    assert await harness.redis.keys(old + "*") == []
    assert await harness.env() == 2


async def test_registrations_are_bounded_until_a_reset(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MOST_ENVS", 2)
    await harness.start()
    assert [await harness.env(), await harness.env()] == [0, 1]
    with pytest.raises(ApiProblem) as refused:
        await harness.env()
    assert refused.value.code == "too_many_envs"
    await harness.queue.reset()
    await harness.start()
    assert await harness.env() == 0


async def test_who_is_gone_or_silent_does_not_count(harness: StoreHarness) -> None:
    await harness.start()
    for number in range(12):
        assert await harness.env(share=0.1, name=str(number)) == number
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    assert await listener.recorded(harness.queue.disconnect(1)) == (set(), [told("disconnect_env", env=1)])
    assert not await harness.queue.disconnect(12)
    await listener.close()
    await harness.silence(2)
    view = await harness.queue.env(0)
    assert view is not None
    assert list(view.shares) == [str(number) for number in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11)], "by number"
    assert len(view.connected) == 10
    assert len(dict.fromkeys(map(str, view.shares))) == 10
    view = await harness.queue.env(2)
    assert view is not None
    assert "2" in view.shares, "a request counts as a sign of life"
    for number in range(12):
        await harness.silence(number)
    view = await harness.queue.env(1)
    assert view is not None
    assert (view.connected, view.shares) == ([], {}), "who said goodbye is gone whatever it asks"


async def test_what_was_heard_lately_is_not_written_again(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env()
    silence_ms = harness.limits.env_ttl_s * 1000
    for ago, written in ((0.05, False), (0.15, True)):
        deadline = int(time.time() * 1000 + (1 - ago) * silence_ms)
        await harness.redis.zadd(START + "envs", {str(number): deadline})
        await harness.queue.env(number)
        assert (await harness.redis.zscore(START + "envs", str(number)) != deadline) == written


async def test_the_group_size_rises_to_the_largest_that_is_ready(harness: StoreHarness) -> None:
    await harness.start(batch_size=64)
    first, second = await harness.env(group_size=2), await harness.env(group_size=4)
    await harness.submit(scored(6, first), scored(8, first), scored(8, None), scored(16, second))
    view = await harness.queue.env(first)
    assert view is not None
    assert view.group_size == 8
    assert sorted(view.ready) == [("", 8, 1), ("0", 6, 1), ("0", 8, 1), ("1", 16, 1)]
    assert [await harness.redis.hget(f"{START}env:{number}", "group_size") for number in (0, 1)] == [b"8", b"4"]


async def test_a_batch_is_lent_acked_and_its_step_begins(harness: StoreHarness, listener: EventListener) -> None:
    await harness.start()
    await harness.submit(*[scored()] * 4)
    await listener.recorded()
    assert await listener.recorded(harness.lend("atropos:1")) == (set(), [told("lease", batch="atropos:1", groups=2)])
    answer = await harness.queue.lease("atropos:1")
    assert answer is not None
    assert [(group.group_id, group.size) for group in answer.groups] == [(name, 100) for name in names(0, 1)]
    assert answer.dead == 0
    assert await harness.ready() == names(2, 3)
    assert await harness.redis.hget(START + "group:a00000000", "attempts") == b"1"
    assert await listener.recorded() == NOTHING, "a retry"
    acked: Recorded = (set(), [told("ack", batch="atropos:1", groups=2)])
    assert await listener.recorded(harness.queue.ack("atropos:1")) == acked
    assert await harness.queue.ack("atropos:1")
    assert await listener.recorded() == NOTHING
    trainer = await harness.queue.trainer()
    assert trainer is not None
    assert trainer.step == 1, "once, however often it is reported"
    assert not await harness.queue.ack("atropos:never")
    audit = await harness.store.runs.audit(RUN)
    assert (audit.trained, audit.ready, audit.leased) == (names(0, 1), names(2, 3), [])
    assert await harness.redis.exists(START + "batch:atropos:1") == 0
    assert await harness.redis.zcard(START + "leases") == 0
    assert await harness.redis.hgetall(START + "atropos") != {}


async def test_leases_of_batches_run_out_and_live_on(harness: StoreHarness) -> None:
    await harness.start()
    await harness.submit(*[scored()] * 4)
    before = time.time()
    await harness.lend("atropos:1")
    await harness.lend("atropos:2")

    async def deadline(batch_id: str) -> float:
        return float(await harness.redis.zscore(START + "leases", batch_id) or 0) / 1000

    for batch_id in ("atropos:1", "atropos:2"):
        assert before + 29.9 < await deadline(batch_id) < time.time() + 30.1
    await harness.expire_lease("atropos:1")
    assert await harness.queue.extend("atropos:1"), "its expiry was not seen yet"
    assert before + 29.9 < await deadline("atropos:1") < time.time() + 30.1
    assert not await harness.queue.extend("atropos:9")
    assert await harness.redis.zcard(START + "leases") == 2
    await harness.expire_lease("atropos:1")
    assert await harness.lend("atropos:3") == names(0, 1)
    assert not await harness.queue.extend("atropos:1")
    assert not await harness.queue.ack("atropos:1"), "its groups moved on"
    await harness.expire_lease("atropos:2")
    assert await harness.lend("atropos:4") == names(2, 3)
    await harness.expire_lease("atropos:4")
    await harness.expire_lease("atropos:3")
    await harness.submit(scored(1))
    await harness.redis.hset(START + "atropos", "batch_size", 999)
    assert await harness.lend("atropos:5") is None
    assert await harness.ready() == names(0, 1, 2, 3, 4)
    assert await harness.lend("atropos:4") == names(2, 3), "expired, and no trainer holds its groups"
    assert before + 29.9 < await deadline("atropos:4") < time.time() + 30.1
    assert await harness.queue.ack("atropos:3"), "late, and no trainer holds its groups"
    assert await harness.redis.smembers(START + "expired") == set()
    assert (await harness.store.runs.audit(RUN)).trained == names(0, 1)
    assert (await harness.store.runs.status(RUN)).leased == 2


async def test_a_vanished_client_gives_its_batch_back(harness: StoreHarness, listener: EventListener) -> None:
    await harness.start()
    await harness.submit(*[scored()] * 3)
    await harness.lend("atropos:1")
    await listener.recorded()
    given_back = ({f"ready {START}"}, [told("nack", batch="atropos:1", groups=2)])
    assert await listener.recorded(harness.queue.nack("atropos:1")) == given_back
    assert await listener.recorded(harness.queue.nack("atropos:1")) == NOTHING
    assert await harness.ready() == names(0, 1, 2)
    assert not await harness.queue.ack("atropos:1")
    assert await harness.redis.exists(START + "batch:atropos:1") == 0
    assert await harness.lend("atropos:1") == names(0, 1), "the name is free again"


async def test_groups_that_can_be_in_no_batch_are_set_aside(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as client:
        harness = StoreHarness(client, Limits(max_attempts=2))
        await harness.start()
        await harness.submit(scored(5), scored(2), scored(4), scored(9), scored(2))
        answer = await harness.queue.lease("atropos:1")
        assert answer is not None
        leased = [group.group_id for group in answer.groups]
        assert (leased, answer.dead) == (names(2), 2)
        letters = await harness.store.dead_letters.all(RUN, 0, 9)
        assert [(letter.group_id, letter.reason) for letter in letters] == [
            (name, "larger_than_a_batch") for name in names(0, 3)
        ]
        for attempt in range(2):
            assert await harness.lend(f"atropos:again{attempt}") == names(1, 4)
            await harness.queue.nack(f"atropos:again{attempt}")
        await harness.submit(scored(4))
        answer = await harness.queue.lease("atropos:2")
        assert answer is not None
        leased = [group.group_id for group in answer.groups]
        assert (leased, answer.dead) == (names(5), 2)
        status = await harness.store.runs.status(RUN)
        assert (status.dead, status.accepted, status.ready) == (4, 2, 0)


async def test_lease_returns_no_batch_if_all_its_groups_became_dead_letters(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as client:
        harness = StoreHarness(client, Limits(max_attempts=1))
        await harness.start()
        await harness.submit(scored(), scored(), scored())
        assert await harness.lend("atropos:1") == names(0, 1)
        await harness.queue.nack("atropos:1")
        answer = await harness.queue.lease("atropos:2")
        assert answer is not None
        assert (answer.groups, answer.dead) == ([], 2)
        status = await harness.store.runs.status(RUN)
        assert (status.dead, status.leased, status.ready) == (2, 0, 1)
        assert await harness.redis.hlen(START + "leased") == 0


async def test_extend_revives_an_expired_batch_whose_groups_are_ready(harness: StoreHarness) -> None:
    await harness.start()
    await harness.submit(*[scored()] * 2)
    assert await harness.lend("atropos:1") == names(0, 1)
    await harness.expire_lease("atropos:1")
    await harness.redis.hset(START + "atropos", "batch_size", 999)
    assert await harness.lend("atropos:2") is None
    assert await harness.ready() == names(0, 1)
    assert await harness.queue.extend("atropos:1")
    assert await harness.ready() == []
    await harness.redis.hset(START + "atropos", "batch_size", 4)
    assert await harness.lend("atropos:3") is None, "its groups are still being sent"
    assert await harness.queue.ack("atropos:1")
    assert (await harness.store.runs.audit(RUN)).trained == names(0, 1)


async def test_a_silent_environments_share_is_not_kept(harness: StoreHarness) -> None:
    await harness.start()
    quiet, busy = await harness.env(share=0.5), await harness.env()
    await harness.submit(*[scored(2, busy)] * 2)
    assert await harness.lend("atropos:1") is None
    await harness.silence(quiet)
    assert await harness.lend("atropos:1") == names(0, 1)


@pytest.mark.parametrize("batch_size", [0, -4])
async def test_a_batch_of_nothing_is_never_full(harness: StoreHarness, batch_size: int) -> None:
    await harness.start(batch_size)
    await harness.submit(scored())
    assert await harness.lend("atropos:1") is None


async def test_acked_batches_are_archived_and_their_names_trimmed(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as client:
        harness = StoreHarness(client, archive=True)
        await harness.start()
        await harness.submit(*[scored()] * 2)
        await client.zadd(START + "acked", {f"old{number}": number for number in range(5000)})
        listener = EventListener(client, RUN)
        await listener.open()
        await harness.lend("atropos:1")
        await listener.recorded()
        topics, _ = await listener.recorded(harness.queue.ack("atropos:1"))
        assert topics == {f"archive {START}"}
        await listener.close()
        assert await harness.store.archive.head(RUN, 9) == names(0, 1)
        assert await client.zcard(START + "acked") == 4096
        assert await harness.queue.ack("atropos:1")


async def test_a_reset_forgets_all_but_what_comes_after_it(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env(group_size=4, share=0.5)
    await harness.submit(*[scored()] * 700)
    await harness.submit(scored(2, number))  # in its buffer
    await harness.queue.disconnect(number)
    lent = await harness.lend("atropos:1")
    assert lent == names(0, 1)
    await harness.submit(scored(4, number))
    await harness.lend("atropos:2")
    await harness.expire_lease("atropos:2")
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    submitting = asyncio.create_task(_submit_meanwhile(harness))
    topics, events = await listener.recorded(harness.queue.reset())
    await submitting
    await listener.close()
    assert topics >= {f"permits {START}"}
    assert told("reset") in events
    audit = await harness.store.runs.audit(RUN)
    assert set(audit.dropped.values()) == {"reset"}
    assert len(audit.dropped) + len(audit.ready) == 702
    assert not {*names(0, 1)} & {*audit.ready}
    assert not await harness.queue.ack("atropos:1")
    assert await harness.queue.trainer() is None
    assert await harness.queue.env(number) is None
    assert not [name for name in await harness.redis.keys(START + "atropos*") if b"receipt" not in name]
    status = await harness.store.runs.status(RUN)
    assert (status.leased, status.bytes) == (0, 100 * len(audit.ready))
    assert await harness.redis.zcard(START + "leases") == 0
    await harness.queue.reset()
    assert await harness.ready() == []


async def _submit_meanwhile(harness: StoreHarness) -> None:
    await harness.submit(scored())


async def test_deleting_the_run_leaves_nothing(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env(group_size=4)
    await harness.submit(scored(2, number), scored(2))
    await harness.store.runs.close(RUN)
    await harness.store.runs.delete(RUN)
    left = [name for name in await harness.redis.keys(START + "*") if b"receipt" not in name]
    assert left == [f"{START}fence".encode()]
    assert int(await harness.redis.get(keys.BYTES) or 0) == 0


async def test_a_group_too_large_for_any_batch_is_found_behind_a_long_queue(harness: StoreHarness) -> None:
    await harness.start(batch_size=4)
    await harness.submit(*[scored(1)] * 300, scored(9))
    answer = await harness.queue.lease("atropos:1")
    assert answer is not None
    leased = [group.group_id for group in answer.groups]
    assert (leased, answer.dead) == (names(0, 1, 2, 3), 1)


async def test_a_reset_of_nothing_leaves_nothing(harness: StoreHarness) -> None:
    await harness.queue.reset()
    assert await harness.redis.keys(START + "*") == []


async def test_no_batch_of_before_a_reset_can_be_acked(harness: StoreHarness) -> None:
    await harness.start(batch_size=2)
    await harness.submit(*[scored()] * 2)
    await harness.lend("atropos:1")
    await harness.lend("atropos:2")
    await harness.expire_lease("atropos:1")
    await harness.redis.hset(START + "atropos", "batch_size", 999)
    assert await harness.lend("atropos:3") is None
    assert await harness.redis.smembers(START + "expired") == {b"atropos:1"}
    await harness.queue.reset()
    assert not await harness.queue.ack("atropos:1"), "it ran out, and its groups are dropped since"
    assert not await harness.queue.ack("atropos:2"), "it was on its way"
    assert await harness.redis.keys(START + "batch:*") == []
    assert (await harness.store.runs.audit(RUN)).trained == []


async def sent(harness: StoreHarness) -> list[bytes | str]:
    """Returns the payloads that no script has taken."""
    return await harness.redis.keys("*:sent:*")


@pytest.mark.parametrize("size", [100, 100_000], ids=["small", "large"])
async def test_a_submit_that_stores_nothing_leaves_no_payload(harness: StoreHarness, size: int) -> None:
    group = scored(text=b"x" * size)
    assert await harness.queue.submit("receipt", [group]) == [None], "it opens the run"
    assert await sent(harness) == []
    assert await harness.queue.submit("receipt", [group]) == [None], "the answer to the first one was lost"
    assert await sent(harness) == []
    assert await harness.ready() == names(0)
    harness.queue = Queue(harness.store, Limits(max_stored_bytes=size), RUN)
    for _ in range(2):
        with pytest.raises(ApiProblem) as refused:
            await harness.submit(group)
        assert refused.value.code == "store_full"
    assert await sent(harness) == []
    await harness.store.runs.close(RUN)
    with pytest.raises(ApiProblem) as refused:
        await harness.submit(group)
    assert refused.value.code == "finished"
    assert await sent(harness) == []
    await harness.store.runs.create("native", {}, 2)
    with pytest.raises(ApiProblem) as refused:
        await Queue(harness.store, Limits(), "native").submit("receipt", [group])
    assert refused.value.code == "not_atropos"
    assert await sent(harness) == []


async def test_a_submit_of_which_a_payload_expired_deletes_the_others(harness: StoreHarness) -> None:
    await harness.start()
    await harness.redis.set(f"{START}sent:0", "x")
    limits = (1 << 30, 1 << 30, 100, 2, 1000)
    groups = (2, 10, "", f"{START}sent:0", "", 2, 10, "", f"{START}sent:1", "")
    reply = await harness.store.scripts.run("atropos_submit", START, "receipt", 1000, *limits, *groups)
    assert reply == [b"GONE"]
    assert await sent(harness) == []


async def test_a_run_is_deleted_in_parts_with_what_its_environments_sent(harness: StoreHarness) -> None:
    await harness.start()
    numbers = [await harness.env(group_size=8) for _ in range(3)]
    for number in numbers:
        await harness.submit(scored(sequences=3, env_id=number), scored(sequences=3, env_id=number))
    assert int(await harness.redis.get(keys.BYTES) or 0) == 600
    await harness.store.runs.close(RUN)
    left = []
    for _ in numbers:
        assert await harness.store.scripts.run("delete", START, 1, 1000, "begin") == [b"MORE"]
        left.append((await harness.redis.zcard(START + "envs"), int(await harness.redis.get(keys.BYTES) or 0)))
    assert left == [(2, 400), (1, 200), (0, 0)]
    assert await harness.store.scripts.run("delete", START, 1, 1000, "continue") == [b"OK"]
    names_left = [name for name in await harness.redis.keys(START + "*") if b"receipt" not in name]
    assert names_left == [f"{START}fence".encode()]


async def test_a_status_does_not_read_all_environments_that_ever_disconnected(harness: StoreHarness) -> None:
    await harness.start()
    here, *gone = [await harness.env() for _ in range(4)]
    for number in gone:
        await harness.queue.disconnect(number)

    async def read() -> int:
        return int((await harness.redis.info("commandstats")).get("cmdstat_smembers", {}).get("calls", 0))

    before = await read()
    view = await harness.queue.env(here)
    assert view is not None
    assert len(view.connected) == 1
    assert await read() == before
