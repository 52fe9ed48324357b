"""Data stored with a run's groups: metrics and examples."""

from __future__ import annotations

import json

import pytest
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, submission

from gristmill import MetricsRow
from gristmill_api.errors import ApiProblem

DAY_MS = 86_400_000
MOST_BYTES = 2**20


async def test_metrics_keep_the_newest_rows_and_one_row_per_step(harness: StoreHarness) -> None:
    journal = harness.store.journal

    async def measure(step: int, loss: float, source: str = "trainer") -> None:
        await journal.record_metrics(RUN, MetricsRow(source=source, step=step, values={"loss": loss}))

    await harness.redis.zadd(
        PREFIX + "metrics:trainer", {f'{{"step": {step}, "values": {{}}}}': step for step in range(10_000)}
    )
    await measure(9_999, 1.0)
    assert await harness.redis.zcard(PREFIX + "metrics:trainer") == 10_000
    await measure(10_000, 2.0)
    await measure(10_000, 3.0)
    await measure(1, 4.0, "env-1")
    assert await harness.redis.zcard(PREFIX + "metrics:trainer") == 10_000
    rows = [json.loads(row) for row in await journal.rows(RUN, "trainer", 9_997, 9)]
    assert [(row["step"], row["values"].get("loss")) for row in rows] == [(9998, None), (9999, 1.0), (10_000, 3.0)]
    assert json.loads((await journal.rows(RUN, "trainer", -1, 1))[0])["step"] == 1
    assert await journal.sources(RUN) == ["env-1", "trainer"]
    with pytest.raises(ApiProblem):
        await journal.record_metrics("nowhere", MetricsRow(source="t", step=1, values={}))


async def test_examples_outlive_their_groups(harness: StoreHarness) -> None:
    incarnation = await harness.start(groups=16)
    ids = await harness.fill(10)
    await harness.lease(incarnation, "b1", 9)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    latest = [found async for found in harness.store.journal.examples(RUN, 8)]
    assert [group_id for group_id, _ in latest] == list(reversed(ids[2:]))
    assert [body for _, body in latest] == [submission(group_id).body for group_id, _ in latest]
    more = await harness.fill(3)
    assert [group_id async for group_id, _ in harness.store.journal.examples(RUN, 3)] == list(reversed(more))
    kept = await harness.redis.keys(PREFIX + "example:*")
    assert len(kept) == 4, "9 were trained, of which 4 are among the latest 8"
    assert [DAY_MS - 60_000 < await harness.redis.pttl(key) <= DAY_MS for key in kept] == [True] * 4


async def test_large_groups_are_not_kept_as_examples_after_training(harness: StoreHarness) -> None:
    incarnation = await harness.start(groups=2)
    ids = await harness.ask("env-1", 2)
    for group_id, size in zip(ids, (MOST_BYTES, MOST_BYTES + 1), strict=True):
        await harness.store.queue.submit(RUN, "env-1", submission(group_id, size=size))
    await harness.lease(incarnation, "b1", 2)
    assert len([found async for found in harness.store.journal.examples(RUN, 8)]) == 2
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert [group_id async for group_id, _ in harness.store.journal.examples(RUN, 8)] == ids[:1]
    assert await harness.redis.get("gm:bytes") == b"0"
