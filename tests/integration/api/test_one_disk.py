"""The archive and Redis' append-only file on one small disk: the archive leaves Redis the floor of free space."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis
from tests.integration.api.test_archive import RUN, Loop, ids, until
from tests.support.api_server import ApiServer
from tests.support.grids import rest_is_long
from tests.support.redis_server import RedisServer
from tests.support.small_disk import mounted

from gristmill import Client
from gristmill.archive import segments
from gristmill.internal.archive_writer import free_bytes
from gristmill_api.store import keys

MIB = 1 << 20
DISK, FLOOR = 26, 6
"""MiB."""
LARGE = 20_000
"""Tokens per sequence of a group of some 320 kB."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path, DISK):
        for name in ("redis", "runs"):
            (tmp_path / name).mkdir()
        yield tmp_path


@pytest.fixture
def server(disk: Path) -> Iterator[RedisServer]:
    with RedisServer("--dir", str(disk / "redis"), "--auto-aof-rewrite-min-size", "1mb") as server:
        yield server


def api_at(server: RedisServer, disk: Path) -> ApiServer:
    """The cap of the archive is the whole disk."""
    return ApiServer(
        server.api_url,
        GRISTMILL_RUNS_DIR=str(disk / "runs"),
        API_ARCHIVE_MAX_BYTES=str(DISK * MIB),
        API_ARCHIVE_MIN_FREE_BYTES=str(FLOOR * MIB),
    )


async def gauges(api: ApiServer) -> dict[str, float]:
    """All metrics without labels."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{api.url}/metrics")).text
    lines = [line.split() for line in text.splitlines() if line.startswith("gristmill_api") and "{" not in line]
    return {name.removeprefix("gristmill_api_"): float(value) for name, value in lines}


def archived_bytes(disk: Path) -> int:
    return sum(path.stat().st_size for path in segments(disk / "runs" / RUN))


@pytest.mark.long
async def test_archive_leaves_redis_the_floor_of_free_space(disk: Path, server: RedisServer) -> None:
    with api_at(server, disk) as api:
        async with Redis.from_url(server.url) as redis, Client(api.url, patience=0) as client:

            async def all_settled() -> bool:
                """Nothing waits for the archive, and Redis does not hold a second copy of its file."""
                rewriting = (await redis.info("persistence"))["aof_rewrite_in_progress"]
                return not rewriting and await redis.llen(keys.archive(RUN)) == 0

            loop = Loop(client)
            await loop.start()
            # More than the disk. Each request is sent once, so a Redis without room would fail the test.
            for _ in range(35):
                await loop.step(4, length=LARGE)
                await until(all_settled)
                assert archived_bytes(disk) <= (DISK - FLOOR) * MIB
            read = ids(disk / "runs")
            assert len(read) > 4
            assert read == [group.group_id for group in loop.sent][-len(read) :], "the oldest are removed"
            assert (await client.status(RUN)).archive_lost == 0
            assert "removed=000001.gmz" in api.log()

            # Another writer fills the disk: the oldest segments are deleted at once, then nothing more is archived.
            await fill(disk, lambda: len(segments(disk / "runs" / RUN)) == 1)
            before = archived_bytes(disk)
            for _ in range(3):
                await loop.step(2)
                await until(all_settled)
            assert archived_bytes(disk) == before
            assert (await client.status(RUN)).archive_lost == 6
            found = await gauges(api)
            assert found["archive_lost_total"] == 6
            assert 0 < found["archive_free_bytes"] < FLOOR * MIB
            assert found["redis_aof_bytes"] > 0
            assert (found["redis_aof_rewrite_ok"], found["redis_aof_write_ok"], found["redis_up"]) == (1, 1, 1)
            # The segments that were deleted may have made room for a moment.
            recovered = re.findall(r"archive disk=\S+ free=\d+ state=up", api.log())
            assert api.log().count("IS NEARLY FULL") == 1 + len(recovered)
            assert api.log().count("CANNOT BE WRITTEN") == 1

            (disk / "filler").unlink()
            await loop.step(2)
            await until(all_settled)
            assert (await client.status(RUN)).archive_lost == 6
            assert ids(disk / "runs")[-2:] == [group.group_id for group in loop.sent][-2:]
        assert "Traceback" not in api.log()


async def fill(disk: Path, done: Callable[[], bool]) -> None:
    """Leaves less than half of the floor, and waits until the archive has also given up its room."""
    while not done() or free_bytes(disk) > FLOOR * MIB // 2:
        with (disk / "filler").open("ab") as file:
            file.write(bytes(max(0, free_bytes(disk) - 3 * MIB)))
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("user", rest_is_long("info not allowed", "info allowed"))
async def test_metrics_lack_only_the_redis_gauges_if_info_is_forbidden(
    disk: Path, server: RedisServer, user: str
) -> None:
    """Without INFO only the gauges from INFO are missing; Redis does not count as unreachable."""
    async with Redis.from_url(server.url) as redis:
        if user == "info not allowed":
            await redis.acl_setuser("api", enabled=True, commands=["-info"])
        with api_at(server, disk) as api:
            found = await gauges(api)
            assert found["redis_up"] == 1
            assert ("redis_aof_bytes" in found) == ("redis_memory_bytes" in found) == (user == "info allowed")
            assert found["archive_free_bytes"] > 0
