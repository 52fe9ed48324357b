"""How many permits of a real API a process holds: a slot is free when its completions are done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from tests.support.api_server import ApiServer

from gristmill import Client, Permit, PolicyVersion
from gristmill_env.errors import RunReplacedError
from gristmill_env.permits import Permits

RUN = "sums"
TRAINER = {"batch_size": 32, "gradient_accumulation_steps": 1, "training_steps": 4, "max_staleness": 0}
"""With groups of 2: sixteen permits per step."""
ROOM = 2


class Slots:
    """Work under permits, whose parts end when the test lets them."""

    def __init__(self, api: Client, room: Callable[[], int]) -> None:
        self.permits = Permits(api, RUN, "env", room, lambda version: None)
        self.begun: list[Permit] = []
        self.new: asyncio.Queue[Permit] = asyncio.Queue()
        self.ends: dict[str, asyncio.Event] = {}

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            await self.permits.work(tasks, self.work)

    async def work(self, permit: Permit, version: str) -> None:
        self.ends[permit.group_id] = asyncio.Event()
        self.new.put_nowait(permit)
        await self.ends[permit.group_id].wait()

    def played(self, number: int) -> None:
        self.permits.played(self.begun[number])

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
def room() -> list[int]:
    """The free slots, in a list so that the test can change the number."""
    return [ROOM]


@pytest.fixture
async def slots(api: Client, room: list[int]) -> AsyncIterator[Slots]:
    slots = Slots(api, lambda: room[0])
    serving = asyncio.create_task(slots.serve())
    yield slots
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def test_the_next_permit_comes_when_the_completions_are_there(slots: Slots, api: Client) -> None:
    await slots.begins(ROOM)
    slots.played(0)
    await slots.begins(ROOM + 1)  # though the first is not finished
    assert (await api.status(RUN)).outstanding == ROOM + 1
    slots.end(0)
    await slots.begins(ROOM + 1)  # its slot is given once, not twice


async def test_work_that_never_played_frees_its_slot_at_its_end(slots: Slots) -> None:
    await slots.begins(ROOM)
    slots.end(1)
    await slots.begins(ROOM + 1)


async def test_at_most_as_many_again_are_past_their_completions(slots: Slots) -> None:
    for number in range(ROOM):
        await slots.begins(ROOM + number)
        slots.played(number)
    await slots.begins(2 * ROOM)
    slots.played(ROOM)
    await slots.begins(2 * ROOM)
    slots.end(0)
    await slots.begins(2 * ROOM + 1)


async def test_without_room_no_permit_is_asked_for(slots: Slots, room: list[int]) -> None:
    await slots.begins(ROOM)
    room[0] = 0
    slots.played(0)
    slots.end(1)
    await slots.begins(ROOM)


async def test_a_process_stops_if_its_run_was_replaced_meanwhile(api: Client) -> None:
    slots = Slots(api, lambda: ROOM)
    serving = asyncio.create_task(slots.serve())
    await slots.begins(ROOM)
    await api.create_run(RUN, {"model": "another"}, 2)  # it is not registered, so it does not count as alive
    incarnation, _ = await api.take(RUN, TRAINER, [])
    await api.record_version(RUN, PolicyVersion(incarnation, 0))
    for number in range(ROOM):
        slots.end(number)
    with pytest.raises(ExceptionGroup) as stopped:
        await asyncio.wait_for(serving, 30)
    assert stopped.group_contains(RunReplacedError)
    assert (await api.status(RUN)).bytes == 0
