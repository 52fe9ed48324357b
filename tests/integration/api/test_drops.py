"""The fates of groups that are not archived reach drops.jsonl in the run's folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import trainer
from tests.support.api_server import ApiServer
from tests.support.groups import make_group

from gristmill import Client, PolicyVersion
from gristmill.archive.drops import Drop, read_drops
from gristmill_api.store import keys

RUN = "run-1"


@asynccontextmanager
async def served(redis_url: str, runs: Path, **environ: str) -> AsyncIterator[tuple[ApiServer, Client, int]]:
    """An API that archives to `runs`, a client of it, and the incarnation of the run's trainer."""
    variables = {"GRISTMILL_RUNS_DIR": str(runs), "API_ARCHIVE_MIN_FREE_BYTES": "0", **environ}
    with ApiServer(redis_url, **variables) as server:
        async with Client(server.url, patience=60) as client:
            await client.create_run(RUN, {"dataset": "d"}, 2)
            incarnation, _ = await client.take(RUN, trainer(steps=10_000, staleness=9_000), [])
            await client.record_version(RUN, PolicyVersion(incarnation, 0))
            yield server, client, incarnation


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Waits for the condition. The test's own time-out is the bound."""
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def waiting(redis: Redis) -> int:
    return await redis.llen(keys.fates(RUN))


async def submit(client: Client, count: int) -> list[str]:
    """Returns the ids of new groups."""
    permits = (await client.permits(RUN, "env-1", count, wait=5)).permits
    for permit in permits:
        await client.submit(make_group(permit.group_id, RUN), "env-1")
    return [permit.group_id for permit in permits]


def drops(runs: Path) -> list[Drop]:
    return [drop for drop, _ in read_drops(runs / RUN / "drops.jsonl")]


def facts(runs: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(drop, name) for name in ("group_id", "what", "reason", *names)) for drop in drops(runs)]


async def test_dropped_rows_and_dead_letters_are_listed(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path, API_MAX_ATTEMPTS="1") as (_, client, incarnation):
        (first,) = (await client.permits(RUN, "env-1", 1, wait=5)).permits
        await client.return_permit(RUN, "env-1", first.group_id, "same_scores")
        dead, purged = await submit(client, 2)
        assert await client.lease(RUN, incarnation, "b1", groups=2, wait=5)
        await client.nack(RUN, incarnation, ["b1"])
        assert await client.lease(RUN, incarnation, "b2", groups=2, wait=0) is None
        await client.replay_dead_letters(RUN, [dead])
        await client.purge_dead_letters(RUN, [purged])
        await until(lambda: _none(redis))
    record = (await _created(redis)) or 0
    assert facts(tmp_path, "env_id", "row", "step", "sequences") == [
        (first.group_id, "dropped", "same_scores", "env-1", 0, None, None),
        (dead, "dead", "undeliverable", "env-1", 1, 0, 2),
        (purged, "dead", "undeliverable", "env-1", 2, 0, 2),
        (dead, "replayed", "replayed", "env-1", 1, 0, 2),
        (purged, "dropped", "purged", "env-1", 2, 0, 2),
    ]
    assert {drop.creation for drop in drops(tmp_path)} == {record}
    times = [drop.time_ms for drop in drops(tmp_path)]
    assert times == sorted(times)
    assert times[0] >= record


async def test_fates_wait_in_redis_while_the_disk_fails(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / RUN).write_text("a file where the run's folder should be")
    async with served(redis_url, tmp_path) as (_, client, _incarnation):
        (permit,) = (await client.permits(RUN, "env-1", 1, wait=5)).permits
        await client.return_permit(RUN, "env-1", permit.group_id, "too_long")
        await asyncio.sleep(3)
        assert await waiting(redis) == 1
        (tmp_path / RUN).unlink()
        await until(lambda: _none(redis))
    assert facts(tmp_path) == [(permit.group_id, "dropped", "too_long")]


async def test_deletion_and_replacement_of_a_run_wait_for_its_fates(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    """While the disk is nearly full, fates stay in Redis."""
    full = {"API_ARCHIVE_MIN_FREE_BYTES": str(1 << 60)}
    async with served(redis_url, tmp_path, **full) as (server, client, _), httpx.AsyncClient() as http:
        (permit,) = (await client.permits(RUN, "env-1", 1, wait=5)).permits
        await client.return_permit(RUN, "env-1", permit.group_id, "too_long")
        other = {"run_id": RUN, "env": {"dataset": "other"}, "group_size": 2}
        answer = await http.post(f"{server.url}/v1/runs", json=other)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "archiving")
        assert answer.headers["retry-after"] == "1"
        await client.close_run(RUN)
        answer = await http.delete(f"{server.url}/v1/runs/{RUN}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "archiving")
        assert await waiting(redis) == 1
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path), API_ARCHIVE_MIN_FREE_BYTES="0") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            while (answer := await http.delete(f"/v1/runs/{RUN}")).status_code == 409:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert answer.is_success
        async with Client(server.url, patience=60) as client:
            await client.create_run(RUN, {"dataset": "d"}, 2)
            incarnation, _ = await client.take(RUN, trainer(), [])
            await client.record_version(RUN, PolicyVersion(incarnation, 0))
            (permit,) = (await client.permits(RUN, "env-1", 1, wait=5)).permits
            await client.return_permit(RUN, "env-1", permit.group_id, "same_scores")
            await client.create_run(RUN, {"dataset": "other"}, 2)  # It replaces the run, once the fate is on disk.
    assert [fate[2] for fate in facts(tmp_path)] == ["too_long", "same_scores"]


@pytest.mark.long
async def test_without_an_archive_no_fate_stays_in_redis(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path, API_ARCHIVE_MAX_BYTES="0") as (_, client, _incarnation):
        (permit,) = (await client.permits(RUN, "env-1", 1, wait=5)).permits
        await client.return_permit(RUN, "env-1", permit.group_id, "too_long")
        await until(lambda: _none(redis))
    assert not (tmp_path / RUN).exists()


async def test_groups_that_the_archive_cannot_write_are_listed_as_let_go(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / "rollouts").write_text("a file where the archive should be")
    async with served(redis_url, tmp_path) as (_, client, incarnation):
        ids = await submit(client, 2)
        assert await client.lease(RUN, incarnation, "b1", groups=2, wait=5)
        await client.ack(RUN, incarnation, ["b1"])
        await until(lambda: _listed(tmp_path, 2))
        assert (await client.status(RUN)).archive_lost == 2
    assert sorted(facts(tmp_path, "env_id")) == [(one, "let_go", "archive_lost", "env-1") for one in sorted(ids)]


async def _none(redis: Redis) -> bool:
    return await waiting(redis) == 0


async def _listed(runs: Path, count: int) -> bool:
    return len(drops(runs)) == count


async def _created(redis: Redis) -> int | None:
    found = await redis.hget(keys.record(RUN), "created_ms")
    return None if found is None else int(found)
