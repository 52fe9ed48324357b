"""The disk under Redis' append-only file is full. The API acknowledges only groups that are on disk, and the run
continues when there is room again.

With `appendfsync always` Redis exits when it cannot append, and a container engine starts it again, as these tests do.
The API answers 503 meanwhile.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import httpx
import pytest
from tests.support.api_server import ApiServer
from tests.support.redis_server import RedisServer
from tests.support.scripted_run import ENV, GROUP_SIZE, expected_group, plan
from tests.support.small_disk import mounted

from gristmill import GROUP_MEDIA_TYPE, Client, PolicyVersion

RUN = "run-1"
ROOM = 64 << 10
"""Bytes left when the disk begins to fill up: some dozens of groups."""


class Disk(Protocol):
    server: RedisServer

    def fill(self) -> None:
        """Fills the disk until ROOM bytes are left."""

    def empty(self) -> None: ...


class LimitedFile:
    """A limit on the size of Redis' files: write(2) fails with EFBIG, after a short write. Needs no privilege."""

    def __init__(self) -> None:
        self.server = RedisServer()

    def fill(self) -> None:
        size = max(file.stat().st_size for file in self.server.folder.glob("appendonlydir/*.aof"))
        resource.prlimit(self.server.pid, resource.RLIMIT_FSIZE, (size + ROOM, resource.RLIM_INFINITY))

    def empty(self) -> None:
        """Does nothing, because the limit ends with the process that has it."""


class SmallDisk:
    """A separate file system: write(2) fails with ENOSPC. Needs the right to mount."""

    def __init__(self, folder: Path) -> None:
        self.server = RedisServer("--dir", str(folder))
        self._folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    break
            file.truncate(file.tell() - ROOM)

    def empty(self) -> None:
        self._filler.unlink()


@pytest.fixture(params=["limited file", "small disk"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param == "limited file":
        limited = LimitedFile()
        with limited.server:
            yield limited
        return
    with mounted(tmp_path, megabytes=1):
        small = SmallDisk(tmp_path)
        with small.server:
            yield small


async def test_full_disk_loses_nothing_and_the_run_continues_when_there_is_room(disk: Disk) -> None:
    server = disk.server
    with ApiServer(server.url) as api:
        async with Client(api.url, patience=30) as client, httpx.AsyncClient(base_url=api.url) as http:
            await client.create_run(RUN, ENV, GROUP_SIZE)
            incarnation, _ = await client.take(RUN, plan(1000, staleness=100), [])
            await client.record_version(RUN, PolicyVersion(incarnation, 0))
            permits = [permit.group_id for permit in (await client.permits(RUN, "env-1", 300, wait=0)).permits]

            async def put(group_id: str) -> httpx.Response:
                return await http.put(
                    f"/v1/runs/{RUN}/groups/{group_id}?holder=env-1",
                    content=expected_group(RUN, group_id).encode(),
                    headers={"Content-Type": GROUP_MEDIA_TYPE},
                )

            async def fill_up() -> list[str]:
                """Submits groups until the disk is full. Returns the acknowledged groups."""
                stored: list[str] = []
                while (answer := await put(permits[0])).status_code in (200, 201):
                    stored.append(permits.pop(0))
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
                return stored

            acknowledged = [permits.pop(0)]
            assert (await put(acknowledged[0])).status_code == 201
            disk.fill()
            acknowledged += await fill_up()
            assert len(acknowledged) > 5
            server.wait_until_ended()  # Redis cannot promise anything any more

            if isinstance(disk, SmallDisk):
                server.start()  # a restart alone does not help, and does no harm
                assert sorted((await client.audit(RUN)).ready) == acknowledged
                acknowledged += await fill_up()
                server.wait_until_ended()
            disk.empty()
            server.start()
            audit = await client.audit(RUN)
            assert audit.ready == acknowledged
            assert await client.submit(expected_group(RUN, permits[0]), "env-1"), "a refused group is accepted later"
            batch = await client.lease(RUN, incarnation, "b1", len(acknowledged) + 1, wait=0)
            assert batch is not None
            assert [group.group_id for group in batch] == [*acknowledged, permits[0]]
            await client.ack(RUN, incarnation, ["b1"])
            assert not (await client.audit(RUN)).ready
        assert "Traceback" not in api.log()
