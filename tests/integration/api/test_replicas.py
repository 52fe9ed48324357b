"""Two API processes over one Redis serve one run, as behind a load balancer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import trainer
from tests.support.api_server import ApiServer
from tests.support.groups import make_group
from tests.support.ledger import Ledger
from tests.support.scripted_env import serve
from tests.support.scripted_run import ENV, GROUP_SIZE, GROUPS_PER_STEP
from tests.support.scripted_trainer import Checkpoint, train

from gristmill import Client, PolicyVersion, RunState
from gristmill.archive import segment, segments
from gristmill.internal.archive_writer import RunWriter
from gristmill_api import notifications
from gristmill_api.metrics import Metrics
from gristmill_api.notifications import Notifications, listen_to_redis
from gristmill_api.settings import Limits
from gristmill_api.store import Store, keys
from gristmill_api.store.connection import connect

RUN = "run-1"
STEPS = 60
UNDER_WAY = 15
"""Steps after which a process is killed."""


class Balancer:
    """A TCP load balancer on loopback: each connection goes to the next server that accepts it."""

    def __init__(self, *ports: int) -> None:
        self._ports = ports
        self._turn = 0
        self.connections: Counter[int] = Counter()
        """By the server's port."""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Yields its URL."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in self._ports:
            port = self._ports[self._turn % len(self._ports)]
            self._turn += 1
            with contextlib.suppress(ConnectionRefusedError):
                there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
                self.connections[port] += 1
                await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
                return
        writer.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copies until either side closes its connection."""
    with contextlib.suppress(ConnectionError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    sink.close()


@pytest.fixture
async def replicas(redis_url: str, tmp_path: Path) -> AsyncIterator[tuple[ApiServer, ApiServer]]:
    archive = str(tmp_path / "runs")
    with (
        ApiServer(redis_url, GRISTMILL_RUNS_DIR=archive) as one,
        ApiServer(redis_url, GRISTMILL_RUNS_DIR=archive) as other,
    ):
        yield one, other


async def archived_ids(redis: Redis, runs: Path) -> list[str]:
    """Waits until no trained group waits for the disk. Returns the ids of all rows on disk.

    Readers of the archive leave a second row of a group out, so this function reads the segments itself.
    """
    while await redis.llen(keys.archive(RUN)):  # noqa: ASYNC110  the test's time-out is the bound
        await asyncio.sleep(0.1)
    found: list[str] = []
    for path in segments(runs / RUN):
        with path.open("rb") as file:
            segment.read_opening(file, str(path))
            found += segment.read_ids(file)
    return found


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(other, marks=pytest.mark.long) for other in (signal.SIGSTOP, signal.SIGTERM))],
    ids=lambda number: number.name,
)
async def test_run_continues_over_the_other_process_when_one_ends(
    redis: Redis, replicas: tuple[ApiServer, ApiServer], tmp_path: Path, number: signal.Signals
) -> None:
    """The first process started first, so it is the archiver."""
    one, other = replicas
    acknowledged: list[str] = []
    checkpoint = tmp_path / "checkpoint.json"
    balancer = Balancer(one.port, other.port)

    async def end_one() -> None:
        while Checkpoint.load(checkpoint).step < UNDER_WAY:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert min(balancer.connections[one.port], balancer.connections[other.port]) > 0
        os.kill(one.pid, number)

    async with balancer.serving() as url, Client(url, patience=60, timeout=3) as client:
        await client.create_run(RUN, ENV, GROUP_SIZE)
        async with asyncio.TaskGroup() as tasks:
            for holder in ("env-1", "env-2"):
                tasks.create_task(serve(client, RUN, holder, acknowledged.append))
            tasks.create_task(end_one())
            await train(client, RUN, checkpoint, STEPS)
        audit = await client.audit(RUN)
        assert (await client.status(RUN)).state is RunState.FINISHED
    ledger = Ledger.of(acknowledged, Checkpoint.load(checkpoint).trained, audit)
    assert ledger.problems() == {}
    assert len(audit.trained) == STEPS * GROUPS_PER_STEP
    rows = await archived_ids(redis, tmp_path / "runs")
    assert Counter(rows) == Counter(audit.trained)
    if number is signal.SIGSTOP:
        # The process continues after its lease has passed to the other process.
        os.kill(one.pid, signal.SIGCONT)
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{one.url}/readyz", timeout=30)).status_code == 200
        assert Counter(await archived_ids(redis, tmp_path / "runs")) == Counter(audit.trained)


async def test_waiting_requests_wake_by_changes_through_the_other_process(
    replicas: tuple[ApiServer, ApiServer],
) -> None:
    one, other = replicas
    async with Client(one.url) as first, Client(other.url) as second:
        await first.create_run(RUN, ENV, GROUP_SIZE)
        permits = asyncio.create_task(first.permits(RUN, "env-1", 1, wait=30))
        await asyncio.sleep(0.2)
        incarnation, _ = await second.take(RUN, trainer(), [])
        await second.record_version(RUN, PolicyVersion(incarnation, 0))
        permit = (await permits).permits[0]
        lease = asyncio.create_task(first.lease(RUN, incarnation, "b1", 1, wait=30))
        await asyncio.sleep(0.2)
        await second.submit(make_group(permit.group_id, RUN), "env-1")
        batch = await lease
        assert batch is not None
        assert [group.group_id for group in batch] == [permit.group_id]
        await second.ack(RUN, incarnation, ["b1"])
        assert (await first.status(RUN)).trained == 1


async def test_waiting_request_wakes_by_the_message_of_another_process(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check once per second, which would find the change too."""
    monkeypatch.setattr(notifications, "RECHECK_S", 3600)
    here, store = Notifications(), Store(redis, Limits())

    async def attempt() -> int | None:
        return (await store.runs.status(RUN)).ready or None

    async def gone() -> bool:
        return False

    with ApiServer(redis_url) as other:
        async with Client(other.url) as client, connect(redis_url, {}) as listening:
            await client.create_run(RUN, ENV, GROUP_SIZE)
            incarnation, _ = await client.take(RUN, trainer(), [])
            await client.record_version(RUN, PolicyVersion(incarnation, 0))
            (permit,) = (await client.permits(RUN, "env-1", 1, wait=5)).permits
            async with asyncio.TaskGroup() as tasks:
                listener = tasks.create_task(listen_to_redis(listening, here, Metrics(None)))
                waiting = tasks.create_task(here.poll(keys.ready_topic(RUN), attempt, 3600, gone))
                while (await redis.pubsub_numsub(keys.EVENTS))[0][1] < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await client.submit(make_group(permit.group_id, RUN), "env-1")
                assert await waiting == 1
                listener.cancel()


async def test_group_that_a_killed_archiver_wrote_gets_no_second_row(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    """An archiver may be killed after the write to disk and before Redis frees the group."""
    runs = tmp_path / "runs"
    await redis.set(keys.ARCHIVER, "the process that will be killed")
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(runs)) as successor:
        async with Client(successor.url) as client:
            run = await client.create_run(RUN, ENV, GROUP_SIZE)
            incarnation, _ = await client.take(RUN, trainer(), [])
            await client.record_version(RUN, PolicyVersion(incarnation, 0))
            groups = [
                make_group(permit.group_id, RUN) for permit in (await client.permits(RUN, "env-1", 3, wait=5)).permits
            ]
            for group in groups:
                await client.submit(group, "env-1")
            assert await client.lease(RUN, incarnation, "b1", 3, wait=5) is not None
            await client.ack(RUN, incarnation, ["b1"])
        writer = RunWriter(runs / RUN / "rollouts", RUN, round(run.created_at * 1000), 1 << 30)
        for group in groups[:2]:
            writer.append(group.group_id, "group", group.encode())
        writer.close()
        await redis.delete(keys.ARCHIVER)
        assert await archived_ids(redis, runs) == [group.group_id for group in groups]
