"""Leased groups that cannot be sent."""

from __future__ import annotations

from typing import Any

from tests.integration.api.event_listener import EventListener
from tests.integration.atropos_queue.store_harness import RUN, START, StoreHarness, names, scored


async def run(harness: StoreHarness, script: str, *args: str | bytes | int) -> list[Any]:
    status, *rest = await harness.store.scripts.run(script, START, *args)
    return [status.decode(), *rest]


async def test_groups_that_cannot_be_sent_are_set_aside_and_the_others_go_back(harness: StoreHarness) -> None:
    await harness.start(batch_size=6)
    await harness.submit(*[scored()] * 4)
    first, second, third, fourth = names(0, 1, 2, 3)
    await harness.lend("atropos:1")
    await harness.queue.nack("atropos:1")
    await harness.lend("atropos:2")
    listener = EventListener(harness.redis, RUN)
    await listener.open()
    assert await run(harness, "reject", "atropos:9", first, "odd") == ["OK", 0]
    assert (await harness.store.runs.status(RUN)).leased == 3
    assert await listener.recorded() == (set(), [])
    assert await run(harness, "reject", "atropos:2", first, "odd", third, "empty") == ["OK", 2]
    topics, events = await listener.recorded()
    await listener.close()
    assert topics == {f"ready {START}", f"permits {START}"}
    died = [("dead", first, "odd"), ("dead", third, "empty")]
    assert [(event["kind"], event["group"], event["reason"]) for event in events] == died
    audit = await harness.store.runs.audit(RUN)
    assert (audit.ready, audit.dead, audit.leased) == ([second, fourth], [first, third], [])
    letters = await harness.store.dead_letters.all(RUN, 0, 9)
    assert [(letter.group_id, letter.reason, letter.attempts) for letter in letters] == [
        (first, "odd", 1),
        (third, "empty", 1),
    ]
    assert await harness.redis.hmget(START + f"group:{second}", "attempts", "batch") == [b"1", None]
    assert await harness.redis.zcard(START + "leases") == 0
    assert await harness.redis.exists(START + "batch:atropos:2") == 0
    assert await run(harness, "reject", "atropos:2", second, "odd") == ["OK", 0]
    await harness.redis.delete(START + "record")
    assert await run(harness, "reject", "atropos:2", second, "odd") == ["MISSING"]
