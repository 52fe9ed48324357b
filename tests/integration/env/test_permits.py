"""How many permits of a real API a process holds: a place is free when its completions are done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.support.api_server import ApiServer
from tests.support.errors import raises

from gristmill import Client, Permit, PermitSession, PolicyVersion, RunReplacedError

RUN = "sums"
TRAINER = {"batch_size": 32, "gradient_accumulation_steps": 1, "training_steps": 4, "max_staleness": 0}
"""With groups of 2: sixteen permits per step."""
ROOM = 2


class Rows:
    """Rows under permits, whose stages end when the test lets them."""

    def __init__(self, api: Client) -> None:
        self.session = PermitSession(api, RUN, "env")
        self.begun: list[Permit] = []
        self.new: asyncio.Queue[Permit] = asyncio.Queue()
        self.ends: dict[str, asyncio.Event] = {}

    async def serve(self) -> None:
        async with self.session:
            await self.session.run(self.work, ROOM)

    async def work(self, permit: Permit, version: PolicyVersion) -> None:
        self.ends[permit.group_id] = asyncio.Event()
        self.new.put_nowait(permit)
        await self.ends[permit.group_id].wait()

    def generated(self, number: int) -> None:
        self.session.generated(self.begun[number])

    def end(self, number: int) -> None:
        self.ends[self.begun[number].group_id].set()

    async def begins(self, count: int) -> None:
        """Waits until `count` have begun in all, and checks that no more begin."""
        async with asyncio.timeout(10):
            while len(self.begun) < count:
                self.begun.append(await self.new.get())
        await asyncio.sleep(0.3)
        assert self.new.empty()


@pytest.fixture
async def api(redis_url: str, session_api: ApiServer) -> AsyncIterator[Client]:
    """An open run with a trainer, and all permits of its first step free."""
    async with Client(session_api.url, patience=10) as client:
        await client.create_run(RUN, {"model": "tiny"}, 2)
        incarnation, _ = await client.take(RUN, TRAINER, [])
        await client.record_version(RUN, PolicyVersion(incarnation, 0))
        yield client


@pytest.fixture
async def rows(api: Client) -> AsyncIterator[Rows]:
    rows = Rows(api)
    serving = asyncio.create_task(rows.serve())
    yield rows
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def test_next_permit_is_requested_when_completions_are_generated(rows: Rows, api: Client) -> None:
    await rows.begins(ROOM)
    rows.generated(0)
    await rows.begins(ROOM + 1)  # though the first is not finished
    assert (await api.status(RUN)).outstanding == ROOM + 1
    rows.end(0)
    await rows.begins(ROOM + 1)  # its slot is given once, not twice


async def test_work_that_never_generated_frees_its_slot_at_its_end(rows: Rows) -> None:
    await rows.begins(ROOM)
    rows.end(1)
    await rows.begins(ROOM + 1)


async def test_groups_past_generation_are_limited_to_the_number_of_slots(rows: Rows) -> None:
    for number in range(ROOM):
        await rows.begins(ROOM + number)
        rows.generated(number)
    await rows.begins(2 * ROOM)
    rows.generated(ROOM)
    await rows.begins(2 * ROOM)
    rows.end(0)
    await rows.begins(2 * ROOM + 1)


async def test_no_permit_is_requested_without_a_free_slot(rows: Rows) -> None:
    await rows.begins(ROOM)
    rows.session.slots.places = 0
    rows.generated(0)
    rows.end(1)
    await rows.begins(ROOM)


async def test_a_process_stops_if_its_run_was_replaced_meanwhile(api: Client) -> None:
    rows = Rows(api)
    serving = asyncio.create_task(rows.serve())
    await rows.begins(ROOM)
    await api.leave_env(RUN, "env")  # as if the process had been suspended until its registration expired
    await api.create_run(RUN, {"model": "another"}, 2)
    incarnation, _ = await api.take(RUN, TRAINER, [])
    await api.record_version(RUN, PolicyVersion(incarnation, 0))
    for number in range(ROOM):
        rows.end(number)
    with raises(RunReplacedError, "run_replaced", run=RUN):
        await asyncio.wait_for(serving, 30)
    assert (await api.status(RUN)).bytes == 0
