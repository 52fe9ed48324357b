"""Finished runs: the store deletes them after a while, and they cost nothing until then."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import PREFIX, RUN, StoreHarness, trainer

from gristmill_api import background
from gristmill_api.settings import Limits
from gristmill_api.store import Store, keys
from gristmill_api.store.runs import TOMBSTONES_S

MONTH = 30 * 86_400.0
TOMBS = ("trained", "dropped", "tombs")


async def runs(harness: StoreHarness) -> list[str]:
    return [record.run_id for record in await harness.store.runs.all()]


async def age(harness: StoreHarness, *run_ids: str) -> None:
    """Makes the named runs look as if they had finished more than a month ago."""
    assert await harness.redis.zadd(keys.FINISHED, dict.fromkeys(run_ids, 1), xx=True, ch=True) == len(run_ids)


async def finished(harness: StoreHarness, *run_ids: str) -> None:
    for run_id in run_ids:
        await harness.store.runs.create(run_id, {}, 2, stack=None)
        await harness.store.runs.close(run_id)


async def test_a_finished_run_is_deleted_after_its_retention_period(harness: StoreHarness) -> None:
    await finished(harness, "old", "new")
    assert await harness.store.runs.delete_old(MONTH) == []
    await age(harness, "old")
    assert await harness.store.runs.delete_old(0) == [], "0: they stay"
    assert await harness.store.runs.delete_old(MONTH) == ["old"]
    assert sorted(await runs(harness)) == ["new", RUN]
    assert await harness.redis.zrange(keys.FINISHED, 0, -1) == [b"new"]
    assert await harness.store.runs.delete_old(MONTH) == []
    await asyncio.sleep(1.1)
    assert await harness.store.runs.delete_old(0.001) == ["new"]


async def test_a_run_that_is_not_finished_has_no_retention_period(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    await harness.store.runs.record_version(RUN, incarnation, 1)
    await harness.store.runs.finish(RUN, incarnation)
    await age(harness, RUN)
    await harness.store.runs.take(RUN, trainer(steps=11), [])
    assert await harness.redis.zcard(keys.FINISHED) == 0
    await harness.store.runs.create("other", {}, 2)
    assert (await harness.store.runs.record(RUN)).state == "suspended"
    assert await harness.store.runs.delete_old(0.001) == []
    assert sorted(await runs(harness)) == ["other", RUN]


async def test_a_run_whose_groups_wait_for_the_archive_is_deleted_later(redis: Redis) -> None:
    harness = StoreHarness(Store(redis, Limits(), archive=True), redis)
    await harness.create()
    incarnation = await harness.start()
    ids = await harness.fill(1)
    await harness.lease(incarnation, "b1", 1)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    await harness.store.runs.close(RUN)
    await age(harness, RUN)
    assert await harness.store.runs.delete_old(MONTH) == []
    assert await harness.store.archive.acquire()
    await harness.store.archive.archived(RUN, ids)
    assert await harness.store.runs.delete_old(MONTH) == [RUN]


async def test_a_deletion_that_was_interrupted_is_continued_by_the_next_sweep(harness: StoreHarness) -> None:
    await harness.start()
    await harness.fill(4)
    await harness.store.runs.close(RUN)
    assert await harness.store.scripts.run("delete", PREFIX, 1, 1000, "begin") == [b"MORE"]
    assert await harness.store.runs.delete_old(0) == [RUN]
    assert await harness.redis.keys(PREFIX + "*") == [f"{PREFIX}fence".encode()]
    assert await harness.redis.exists(keys.DELETING) == 0


async def test_retention_task_deletes_old_runs(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_RETENTION_PAUSE_S", 0.05)
    await finished(harness, "old")
    task = asyncio.create_task(background.keep_retention(harness.store, 0.001))
    async with asyncio.timeout(30):
        while "old" in await runs(harness):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert await runs(harness) == [RUN]


async def test_api_runs_the_retention_task(http: httpx.AsyncClient) -> None:
    assert 'gristmill_api_task_up{task="retention"} 1.0' in (await http.get("/metrics")).text


async def test_tombstones_of_a_finished_run_expire_and_those_of_an_extended_one_stay(harness: StoreHarness) -> None:
    incarnation = await harness.start()
    a, b = await harness.ask("env-1", 2)
    await harness.store.permits.return_permit(RUN, "env-1", b, "too_long")
    await harness.submit("env-1", a)
    await harness.lease(incarnation, "b1", 1)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    assert {await harness.redis.pttl(PREFIX + name) for name in TOMBS} == {-1}
    await harness.store.runs.finish(RUN, incarnation)
    for name in TOMBS:
        assert 0 < await harness.redis.pttl(PREFIX + name) <= TOMBSTONES_S * 1000
    assert not await harness.submit("env-1", a), "until then a late retry is known"
    await harness.store.runs.take(RUN, trainer(steps=11), [])
    assert {await harness.redis.pttl(PREFIX + name) for name in TOMBS} == {-1}


async def scripts_run(redis: Redis) -> int:
    return int((await redis.info("commandstats")).get("cmdstat_evalsha", {}).get("calls", 0))


async def test_metrics_scrape_runs_no_script_for_runs_that_are_not_open(harness: StoreHarness) -> None:
    await finished(harness, *(f"done-{number}" for number in range(20)))
    await harness.store.runs.open_statuses()  # Redis knows the script from here on.
    before = await scripts_run(harness.redis)
    assert set(await harness.store.runs.open_statuses()) == {RUN}
    assert await scripts_run(harness.redis) == before + 1
    await harness.store.runs.create("other", {}, 2)
    await harness.store.runs.create("free", {}, 2, stack=None)
    assert set(await harness.store.runs.open_statuses()) == {"free", "other"}, "the first one is suspended"
    await harness.store.runs.create(RUN, {"dataset": "d"}, 2)
    assert set(await harness.store.runs.open_statuses()) == {RUN, "free"}
    await harness.store.runs.close("free")
    await harness.store.runs.create(RUN, {"dataset": "e"}, 2)
    assert set(await harness.store.runs.open_statuses()) == {RUN}, "it was replaced"


async def test_runs_are_listed_in_pages(http: httpx.AsyncClient) -> None:
    ids = [f"run-{number:03}" for number in range(105)]
    for run_id in ids:
        body = {"run_id": run_id, "env": {}, "group_size": 2, "stack": None}
        assert (await http.post("/v1/runs", json=body)).status_code == 201
        await http.post(f"/v1/runs/{run_id}/take", json={"covered": [], "trainer": trainer()})

    async def page(query: str) -> list[str]:
        return [record["run_id"] for record in (await http.get(f"/v1/runs{query}")).raise_for_status().json()]

    assert await page("") + await page("?offset=100") == ids
    assert await page("?offset=3&limit=2") == ids[3:5]
    assert await page("?offset=105") == []
    for query in ("?limit=0", "?limit=1001", "?offset=-1"):
        assert (await http.get(f"/v1/runs{query}")).status_code == 422
