"""The run behind Atropos' protocol: who opens it, resets, submits that store nothing, deletion."""

from __future__ import annotations

import asyncio
import json

import pytest
from redis.asyncio import Redis
from tests.integration.api.event_listener import NOTHING, EventListener
from tests.integration.atropos_queue.store_harness import (
    RUN,
    START,
    StoreHarness,
    event_fields,
    names,
    registration,
    scored,
)
from tests.support.errors import raises

from gristmill_api.atropos.messages import RegisterEnv
from gristmill_api.atropos.queue import Queue
from gristmill_api.errors import ApiProblem
from gristmill_api.settings import Limits
from gristmill_api.store import keys


async def test_first_registered_trainer_defines_the_run(harness: StoreHarness) -> None:
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
    assert await listener.recorded(harness.queue.register(registration())) == (set(), [event_fields("register")])
    await listener.close()


async def test_calls_on_finished_or_native_runs_are_refused(redis_url: str) -> None:
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
            with raises(ApiProblem, "finished") as refused:
                await call()
            assert "ATROPOS_RUN" in refused.value.remedy
        assert await harness.ready() == []


async def test_reset_removes_everything_that_came_before_it(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env(group_size=4, share=0.5)
    await harness.submit(*[scored()] * 700)
    other = await harness.env(group_size=4)
    await harness.submit(scored(2, number), scored(2, other))  # in their buffers
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
    assert event_fields("reset") in events
    audit = await harness.store.runs.audit(RUN)
    assert set(audit.dropped.values()) == {"reset"}
    assert len(audit.dropped) + len(audit.ready) == 704
    assert "a00000701" in audit.dropped, "from a buffer"
    fates = {fate["group_id"]: fate for fate in map(json.loads, await harness.redis.lrange(START + "fates", 0, -1))}
    assert (fates["a00000701"]["env_id"], fates["a00000701"]["sequences"]) == (str(other), 2)
    assert (await harness.store.runs.status(RUN)).dropped == {"reset": len(audit.dropped)}
    assert not {*names(0, 1)} & {*audit.ready}
    assert not await harness.queue.ack("atropos:1")
    assert await harness.queue.trainer() is None
    assert await harness.queue.env(number) is None
    assert await harness.redis.zcard(START + "envs") == 0
    assert not [name for name in await harness.redis.keys(START + "atropos*") if b"receipt" not in name]
    status = await harness.store.runs.status(RUN)
    assert (status.leased, status.bytes) == (0, 100 * len(audit.ready))
    assert await harness.redis.zcard(START + "leases") == 0
    await harness.queue.reset()
    assert await harness.ready() == []
    await harness.start()
    assert not await harness.queue.ack("atropos:1"), "it does not count as a step after the reset"
    trainer = await harness.queue.trainer()
    assert trainer is not None
    assert trainer.step == 0


async def test_reset_keeps_groups_that_arrive_during_it(harness: StoreHarness) -> None:
    await harness.start(8)
    await harness.submit(*[scored(4)] * 300)
    _, last, left = await harness.store.scripts.run("atropos_reset", START, "", 256)
    assert left == 44
    await harness.submit(scored(4))
    await harness.store.scripts.run("atropos_reset", START, last, 256)
    await harness.start(8)
    await harness.submit(scored(4))
    assert await harness.lend("atropos:1") == names(300, 301)


async def _submit_meanwhile(harness: StoreHarness) -> None:
    await harness.submit(scored())


async def test_deleted_run_leaves_only_its_fence_and_receipts(harness: StoreHarness) -> None:
    await harness.start()
    number = await harness.env(group_size=4, share=0.25)
    await harness.submit(scored(2, number), scored(2), scored(4), scored(2))
    await harness.queue.disconnect(number)
    assert await harness.lend("atropos:1") is not None
    await harness.store.runs.close(RUN)
    await harness.store.runs.delete(RUN)
    left = [name for name in await harness.redis.keys(START + "*") if b"receipt" not in name]
    assert left == [f"{START}fence".encode()]
    assert int(await harness.redis.get(keys.BYTES) or 0) == 0


async def test_reset_without_a_run_writes_nothing(harness: StoreHarness) -> None:
    await harness.queue.reset()
    assert await harness.redis.keys(START + "*") == []


async def test_batch_lent_before_a_reset_cannot_be_acked(harness: StoreHarness) -> None:
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


@pytest.mark.parametrize("size", [100, 5_000_000], ids=["small", "large"])
async def test_a_submit_that_stores_nothing_leaves_no_payload(harness: StoreHarness, size: int) -> None:
    """The API asks for room before it sends a large payload."""
    group = scored(body=b"x" * size)
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


async def test_submit_with_one_expired_payload_deletes_the_others(harness: StoreHarness) -> None:
    await harness.start()
    await harness.redis.set(f"{START}sent:0", "x")
    limits = (1 << 30, 1 << 30, 100, 2, 1000)
    groups = [word for key in ("sent:0", "sent:1") for word in (2, 10, "", START + key, "", "", 0, 9)]
    reply = await harness.store.scripts.run("atropos_submit", START, "receipt", 1000, *limits, "0.0", 9, *groups)
    assert reply == [b"GONE"]
    assert await sent(harness) == []


async def test_run_is_deleted_in_parts_with_its_environments_buffers(harness: StoreHarness) -> None:
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
