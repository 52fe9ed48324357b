"""The places of rows, and the renewal of permits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gristmill import Permit, PermitGrant, RunState
from gristmill_env import permits
from gristmill_env.permits import Permits, Slots


async def _free(slots: Slots) -> int:
    """Returns the free places; 0 if a caller would wait."""
    try:
        async with asyncio.timeout(0.05):
            return await slots.free()
    except TimeoutError:
        return 0


def _begin(slots: Slots, *rows: str) -> None:
    for row in rows:
        slots.begin(row)


async def test_generated_row_frees_its_place_at_the_model_servers_once() -> None:
    slots = Slots(2)
    _begin(slots, "a", "b")
    assert await _free(slots) == 0
    slots.generated("a")
    assert await _free(slots) == 1
    slots.begin("c")
    slots.end("a")
    assert await _free(slots) == 0


async def test_later_stages_take_at_most_as_many_rows_as_the_model_servers() -> None:
    slots = Slots(2)
    for row in "abcd":
        slots.begin(row)
        slots.generated(row)
    assert await _free(slots) == 0
    slots.end("a")
    assert await _free(slots) == 1


async def test_waiting_callers_continue_when_places_open() -> None:
    slots = Slots(2)
    slots.places = 0
    waiting = [asyncio.create_task(slots.opened()), asyncio.create_task(slots.opened())]
    free = asyncio.create_task(slots.free())
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in (*waiting, free))
    slots.places = 1
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)
        assert await free == 1


async def test_closed_places_count_rows_that_have_begun() -> None:
    slots = Slots(4)
    _begin(slots, "a", "b")
    slots.places = 1
    assert await _free(slots) == 0
    slots.end("a")
    assert await _free(slots) == 0
    slots.end("b")
    assert await _free(slots) == 1


class Api:
    """Grants one permit again and again, and then reports it as lost."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    async def permits(self, *arguments: object) -> PermitGrant:
        return PermitGrant(permits=[Permit(group_id="g0", row=0)], state=RunState.OPEN, version="1.0")

    async def renew_permits(self, run: str, holder: str, group_ids: list[str]) -> list[str]:
        return [name for name in group_ids if name in self.lost]

    async def return_permit(self, *arguments: object) -> None:
        self.lost.append("g0")
        await asyncio.sleep(0.1)


def _permits(api: Any) -> Permits:
    return Permits(api, "run", "env", Slots(2))


async def test_permit_that_comes_again_during_its_work_is_not_taken_twice() -> None:
    taking = _permits(Api())
    (permit,) = (await taking.take()).permits
    assert (await taking.take()).permits == []
    with taking.working(permit):
        assert (await taking.take()).permits == []
    assert (await taking.take()).permits == [permit]


async def test_work_under_a_lost_permit_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permits, "_RENEW_EVERY", 0.01)
    api = Api()
    taking = _permits(api)
    (permit,) = (await taking.take()).permits

    async def work() -> None:
        with taking.working(permit):
            await asyncio.sleep(60)

    renewal, working = asyncio.create_task(taking.renew()), asyncio.create_task(work())
    await asyncio.sleep(0.05)
    assert not working.done()
    api.lost.append("g0")
    await asyncio.wait([working], timeout=5)
    assert working.cancelled()
    renewal.cancel()


async def test_permit_that_is_reported_as_lost_while_it_is_given_back_is_not_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(permits, "_RENEW_EVERY", 0.01)
    taking = _permits(Api())
    (permit,) = (await taking.take()).permits

    async def work() -> bool:
        with taking.working(permit):
            return await taking.give_back(permit, "bad_row")

    renewal = asyncio.create_task(taking.renew())
    assert await asyncio.create_task(work())
    renewal.cancel()
