"""Acked groups reach the run's folder, whichever process is killed on the way. Nothing waits for a broken disk."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.integration.api.store_harness import StoreHarness, trainer
from tests.support.api_server import ApiServer
from tests.support.grids import rest_is_long
from tests.support.groups import make_group
from tests.support.redis_server import RedisServer

from gristmill import Client, PolicyVersion, TrajectoryGroup, read_rollouts
from gristmill.archive import ArchiveError, segment, segments
from gristmill_api.archive.archiver import Archiver
from gristmill_api.metrics import Metrics
from gristmill_api.notifications import Notifications
from gristmill_api.settings import Limits
from gristmill_api.store import Store, keys
from gristmill_api.store.records import text

RUN = "run-1"
KILLS = 5


class Loop:
    """An environment and a trainer of one run, over HTTP."""

    def __init__(self, client: Client, run_id: str = RUN) -> None:
        self.client = client
        self.run_id = run_id
        self.sent: list[TrajectoryGroup] = []
        self.batches = 0

    async def start(self) -> None:
        await self.client.create_run(self.run_id, {"dataset": "d"}, 2)
        self.incarnation, _ = await self.client.take(self.run_id, trainer(steps=10_000, staleness=9_000), [])
        await self.client.record_version(self.run_id, PolicyVersion(self.incarnation, 0))

    async def step(self, groups: int, length: int = 40) -> None:
        """Takes permits, submits groups, leases them and acks them."""
        batch = []
        for permit in (await self.client.permits(self.run_id, "env-1", groups, wait=5)).permits:
            group = make_group(
                permit.group_id, self.run_id, lengths=[(3, length)] * 2, seed=permit.row,
                version=f"{self.incarnation}.0",
            )  # fmt: skip
            await self.client.submit(group, "env-1")
            batch.append(group)
        self.batches += 1
        leased = await self.client.lease(self.run_id, self.incarnation, f"b{self.batches}", groups, wait=5)
        assert leased is not None
        await self.client.ack(self.run_id, self.incarnation, [f"b{self.batches}"])
        self.sent += leased


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Waits for the condition. The test's own time-out is the bound."""
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def empty(redis: Redis, run_id: str = RUN) -> bool:
    return await redis.llen(keys.archive(run_id)) == 0


async def held(redis: Redis) -> int:
    return int(await redis.get(keys.BYTES) or 0)


def ids(runs: Path, run_id: str = RUN) -> list[str]:
    return [group.group_id for group in read_rollouts(runs / run_id)]


@pytest.fixture
async def loop_at(redis: Redis) -> AsyncIterator[Callable[..., Awaitable[Loop]]]:
    """Starts a run through a server, under an id."""
    clients: list[Client] = []

    async def start(server: ApiServer, run_id: str = RUN) -> Loop:
        clients.append(Client(server.url, patience=60))
        loop = Loop(clients[-1], run_id)
        await loop.start()
        return loop

    yield start
    for client in clients:
        await client.close()


async def test_acked_groups_are_readable_from_the_runs_folder(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        loop = await loop_at(server)
        for _ in range(3):
            await loop.step(5)
        await until(lambda: empty(redis))
        read = list(read_rollouts(tmp_path / RUN))
        assert [group.encode() for group in read] == [group.encode() for group in loop.sent]
        assert [group.group_id for group in read] == [f"g{number:08}" for number in range(15)]
        assert await held(redis) == 0
        assert (await loop.client.status(RUN)).bytes == 0
        assert not [key async for key in redis.scan_iter(keys.payload(RUN, "*"))]


async def test_stopping_the_api_archives_all_waiting_groups(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    await redis.set(keys.ARCHIVER, "another process")
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        loop = await loop_at(server)
        for _ in range(7):
            await loop.step(10)
        assert await redis.llen(keys.archive(RUN)) == 70, "more than the archiver writes at once"
        await redis.delete(keys.ARCHIVER)
        server.stop()
    assert await empty(redis)
    assert ids(tmp_path) == [group.group_id for group in loop.sent]


async def test_archive_contains_only_acked_groups(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        loop = await loop_at(server)
        await loop.step(2)
        for permit in (await loop.client.permits(RUN, "env-1", 3, wait=0)).permits:
            await loop.client.submit(make_group(permit.group_id, RUN), "env-1")
        await loop.client.lease(RUN, loop.incarnation, "kept", 2, wait=0)
        await until(lambda: empty(redis))
    assert ids(tmp_path) == ["g00000000", "g00000001"]


@pytest.mark.parametrize("environ", rest_is_long({"GRISTMILL_RUNS_DIR": ""}, {"API_ARCHIVE_MAX_BYTES": "0"}))
async def test_api_with_archiving_turned_off_writes_no_segments(
    redis: Redis,
    redis_url: str,
    tmp_path: Path,
    loop_at: Callable[..., Awaitable[Loop]],
    environ: dict[str, str],
) -> None:
    with ApiServer(redis_url, None, **{"GRISTMILL_RUNS_DIR": str(tmp_path), **environ}) as server:
        loop = await loop_at(server)
        await loop.step(3)
        assert await held(redis) == 0
        assert "archive=off" in server.log()
    with pytest.raises(ArchiveError):
        segments(tmp_path / RUN)


@pytest.mark.long
async def test_waiting_groups_are_released_when_archiving_is_turned_off(
    tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    with RedisServer() as own:  # no other API exists that could release them
        async with Redis.from_url(own.url) as redis:
            await redis.set(keys.ARCHIVER, "another process")
            with ApiServer(own.url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
                await (await loop_at(server)).step(3)
                assert not await empty(redis)
            await redis.delete(keys.ARCHIVER)
            with ApiServer(own.url, GRISTMILL_RUNS_DIR="") as server:
                await until(lambda: empty(redis))
                assert await held(redis) == 0
                assert "let_go=3" in server.log()


async def test_api_without_archiving_leaves_groups_to_an_api_that_archives(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=""), ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        loop = await loop_at(server)
        for _ in range(3):
            await loop.step(2)
        await until(lambda: empty(redis))
        assert len(ids(tmp_path)) == 6


async def test_archive_has_each_group_once_after_kills_of_the_api(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    """SIGKILL while groups are submitted, acked and written. The test removes the dead process's lock, as if the lock
    had expired."""
    dice = random.Random(1)
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        loop = await loop_at(server)
        enough = asyncio.Event()

        async def train() -> None:
            while not enough.is_set():
                await loop.step(4, length=4000)

        training = asyncio.create_task(train())
        for _ in range(KILLS):
            acked = len(loop.sent)
            while not training.done() and len(loop.sent) == acked:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await asyncio.sleep(dice.uniform(0, 0.1))
            server.kill()
            await redis.delete(keys.ARCHIVER)
            await asyncio.to_thread(server.start)
        enough.set()
        await training
        await until(lambda: empty(redis))
        assert await held(redis) == 0
    assert ids(tmp_path) == [group.group_id for group in loop.sent]
    assert len(loop.sent) >= 4 * KILLS


async def test_archive_reads_each_group_once_after_a_crash_between_disk_and_redis(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        loop = await loop_at(server)
        await redis.set(keys.ARCHIVER, "another process")
        await loop.step(3)
        before = await redis.lrange(keys.archive(RUN), 0, -1)
        names = [name for i in before for name in (keys.payload(RUN, text(i)), keys.group(RUN, text(i)))]
        saved = {name: await redis.dump(name) for name in names}
        await redis.delete(keys.ARCHIVER)
        await until(lambda: empty(redis))
        # Redis in the state in which the disk had the groups and Redis had not recorded that.
        for name, dumped in saved.items():
            assert dumped is not None
            await redis.restore(name, 0, dumped)
        await redis.rpush(keys.archive(RUN), *before)
        await loop.step(1)
        await until(lambda: empty(redis))
    (written,) = segments(tmp_path / RUN)
    assert written.read_bytes().count(b"\x51\x2a\x4d\x18") == 7
    assert ids(tmp_path) == [group.group_id for group in loop.sent]


async def test_archive_has_one_row_per_group_if_redis_goes_away_between_disk_and_redis(
    harness: StoreHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.store = Store(harness.redis, Limits(), archive=True)
    queue = harness.store.archive
    incarnation = await harness.start()
    group_ids = await harness.fill(3)
    await harness.lease(incarnation, "b1", 3)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])

    async def breaks_once(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise RedisConnectionError("reset by peer")

    monkeypatch.setattr(queue, "archived", breaks_once)
    archiver = Archiver(queue, Notifications(), Metrics(tmp_path), tmp_path, Limits())
    task = asyncio.create_task(archiver.run())
    await until(lambda: empty(harness.redis))
    archiver.stop()
    await task
    (path,) = segments(tmp_path / RUN)
    with path.open("rb") as file:
        segment.read_opening(file, str(path))
        assert list(segment.read_ids(file)) == group_ids


async def test_one_of_two_processes_archives_and_the_other_takes_over(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    with (
        ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as first,
        ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as second,
    ):
        one = await loop_at(first)
        await until(lambda: redis.exists(keys.ARCHIVER))
        holder = await redis.get(keys.ARCHIVER)
        await one.step(4)
        two = Loop(Client(second.url, patience=20))
        two.incarnation, two.batches = one.incarnation, 100
        await two.step(4)
        await until(lambda: empty(redis))
        assert await redis.get(keys.ARCHIVER) == holder
        first.stop()
        assert await redis.get(keys.ARCHIVER) != holder, "it need not run out first"
        await two.step(4)
        await until(lambda: empty(redis))
        assert await redis.get(keys.ARCHIVER) != holder
        await two.client.close()
    assert ids(tmp_path) == [group.group_id for group in one.sent + two.sent]
    assert len(segments(tmp_path / RUN)) == 1


async def test_concurrent_runs_have_separate_archives(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        store = Store(redis, Limits())
        for name in ("a", "b"):
            await store.runs.create(name, {"dataset": "d"}, 2, stack=None)
        async with Client(server.url) as client:
            loops = [Loop(client, name) for name in ("a", "b")]
            for loop in loops:
                loop.incarnation, _ = await client.take(loop.run_id, trainer(steps=99, staleness=9), [])
                await client.record_version(loop.run_id, PolicyVersion(loop.incarnation, 0))
            for _ in range(3):
                await asyncio.gather(*(loop.step(2) for loop in loops))
        for loop in loops:
            await until(partial(empty, redis, loop.run_id))
            assert ids(tmp_path, loop.run_id) == [group.group_id for group in loop.sent]


async def test_archive_stays_below_its_cap_and_keeps_the_newest_groups(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    cap = 200_000
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path), API_ARCHIVE_MAX_BYTES=str(cap)) as server:
        loop = await loop_at(server)
        for _ in range(30):
            await loop.step(4, length=500)
            await until(lambda: empty(redis))
            assert sum(path.stat().st_size for path in segments(tmp_path / RUN)) <= cap
    left = ids(tmp_path)
    assert 10 < len(left) < 120
    assert left == [group.group_id for group in loop.sent][-len(left) :]


async def lost(url: str) -> float:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{url}/metrics")).text
    (found,) = [line for line in text.splitlines() if line.startswith("gristmill_api_archive_lost_total")]
    return float(found.split()[1])


async def test_training_continues_if_the_run_folder_is_not_writable(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    """A file blocks the path of the run's folder; later the file is gone."""
    (tmp_path / RUN).write_text("not a folder")
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        loop = await loop_at(server)
        for _ in range(3):
            await loop.step(2)
            await until(lambda: empty(redis))
        assert await lost(server.url) == 6
        assert await held(redis) == 0
        assert server.log().count("CANNOT BE WRITTEN") == 1
        (tmp_path / RUN).unlink()
        await loop.step(2)
        await until(lambda: empty(redis))
        assert await lost(server.url) == 6
        assert ids(tmp_path) == ["g00000006", "g00000007"]


async def test_training_continues_if_the_archive_disk_is_full(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    """The API's process may not write a file larger than 100 kB: the kernel refuses in the middle of a group."""
    with ApiServer(redis_url, 100_000, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        loop = await loop_at(server)
        for _ in range(5):
            await loop.step(4, length=1000)
        await until(lambda: empty(redis))
        lost_groups = int(await lost(server.url))
        assert 0 < lost_groups < 20
        assert await held(redis) == 0
    read = ids(tmp_path)
    assert read == [group.group_id for group in loop.sent][: len(read)]
    assert len(read) == 20 - lost_groups


@pytest.mark.parametrize(("finished", "left"), [(False, 1), (True, 3)], ids=["open", "finished"])
async def test_nearly_full_disk_costs_only_open_runs_their_oldest_groups(
    harness: StoreHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool, left: int
) -> None:
    free = [1 << 40]
    for module in ("gristmill.internal.archive_writer", "gristmill_api.archive.archiver"):
        monkeypatch.setattr(f"{module}.free_bytes", lambda _: free[0])
    monkeypatch.setattr("gristmill.internal.archive_writer.SEGMENT_BYTES", 1)
    monkeypatch.setattr("gristmill_api.store.archive.HOLD_S", 3600.0)
    harness.store = Store(harness.redis, Limits(), archive=True)
    incarnation = await harness.start()
    await harness.fill(3)
    await harness.lease(incarnation, "b1", 3)
    await harness.store.queue.ack(RUN, incarnation, ["b1"])
    queue = harness.store.archive
    archiver = Archiver(queue, Notifications(), Metrics(tmp_path), tmp_path, Limits())
    assert await queue.acquire()
    for run in await queue.waiting():
        assert await archiver._drain(run)
    assert len(segments(tmp_path / RUN)) == 3
    if finished:
        await harness.store.runs.close(RUN)
    free[0] = 0
    await archiver._keep_floor()
    await archiver._close()
    assert len(segments(tmp_path / RUN)) == left


async def test_archiver_writes_a_new_segment_if_its_segment_was_removed(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        loop = await loop_at(server)
        await loop.step(2)
        await until(lambda: empty(redis))
        segments(tmp_path / RUN)[0].unlink()
        await loop.step(2)
        await until(lambda: empty(redis))
        assert await lost(server.url) == 0
    assert ids(tmp_path) == ["g00000002", "g00000003"]


async def test_recreated_run_appends_after_the_old_runs_groups(
    redis: Redis, redis_url: str, tmp_path: Path, loop_at: Callable[..., Awaitable[Loop]]
) -> None:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        loop = await loop_at(server)
        await loop.step(3)
        await until(lambda: empty(redis))
        await loop.client.close_run(RUN)
        async with httpx.AsyncClient() as http:
            (await http.delete(f"{server.url}/v1/runs/{RUN}")).raise_for_status()
        assert len(ids(tmp_path)) == 3, "the folder stays"
        again = await loop_at(server)
        await again.step(2)
        await until(lambda: empty(redis))
    assert ids(tmp_path) == ["g00000000", "g00000001", "g00000002", "g00000000", "g00000001"]


async def test_run_ids_that_are_relative_or_hidden_paths_are_refused(redis_url: str, tmp_path: Path) -> None:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path / "runs")) as server:
        async with httpx.AsyncClient(base_url=server.url) as http:
            for name in ("..", ".", ".hidden"):
                answer = await http.post("/v1/runs", json={"run_id": name, "env": {}, "group_size": 2})
                assert answer.status_code == 422
                assert json.loads(answer.content)["error"]["code"] == "bad_request"
