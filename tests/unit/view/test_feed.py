"""The feed of a run: rows once and in order, one poll for all pages, and a reload when steps are repeated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from gristmill_view import feed
from gristmill_view.feed import Feed, Feeds
from gristmill_view.run_source import RunSource


class Scripted:
    """A source whose run has the steps of `done`."""

    def __init__(self, done: Sequence[int] = ()) -> None:
        self.done = list(done)
        self.polls = 0
        self.trouble: dict[str, str] | None = None

    async def news(self, run: str, after_step: int) -> dict[str, Any]:
        self.polls += 1
        steps = [{"step": step, "loss": 0.5} for step in self.done if step > after_step]
        overview = {"run": run, "state": "open", "settings": {"secret": 1}, "trouble": self.trouble}
        return {"steps": steps, "last_step": max(self.done, default=0), "overview": overview}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "PERIOD_S", 0.01)


def events_in(parts: Sequence[bytes]) -> list[tuple[str, Any]]:
    found = []
    for text in b"".join(parts).decode().split("\n\n"):
        if text.startswith("event: "):
            kind, data = text.split("\n")
            found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def taken(stream: AsyncIterator[bytes], until: str, times: int = 1) -> list[tuple[str, Any]]:
    """Reads until `times` events of a kind came."""
    parts: list[bytes] = []
    async with asyncio.timeout(5):
        async for part in stream:
            parts.append(part)
            if sum(kind == until for kind, _ in events_in(parts)) >= times:
                break
    return events_in(parts)


def running(source: Scripted, after_step: int) -> Feed:
    return Feed(cast(RunSource, source), "run", after_step)


async def test_page_gets_each_step_once_and_the_state() -> None:
    source = Scripted([1, 2, 3])
    stream = running(source, 1).events(1, lambda: False)
    found = await taken(stream, "step", 2)
    assert [data["step"] for kind, data in found if kind == "step"] == [2, 3]
    source.done.append(4)
    more = await taken(stream, "step")
    assert [data["step"] for kind, data in more if kind == "step"] == [4]
    states = [data for kind, data in [*found, *more] if kind == "services"]
    assert states == [{"run": "run", "state": "open"}], "the state is sent when it changes, without settings"
    source.trouble = {"code": "x", "text": "t", "remedy": "r"}
    assert ("trouble", source.trouble) in await taken(stream, "trouble")
    await stream.aclose()  # type: ignore[attr-defined]


async def test_three_pages_cost_one_poll_and_no_page_costs_none() -> None:
    source = Scripted([1])
    feeds = Feeds(cast(RunSource, source))
    streams = [feeds.of("run", 0).events(0, lambda: False) for _ in range(3)]
    for stream in streams:
        await taken(stream, "step")
    polls = source.polls
    await asyncio.sleep(0.2)
    assert source.polls - polls <= 21
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    polls = source.polls
    await asyncio.sleep(0.1)
    assert source.polls == polls


async def test_page_reloads_when_a_trainer_repeats_steps() -> None:
    source = Scripted([1, 2, 3, 4])
    stream = running(source, 0).events(0, lambda: False)
    await taken(stream, "step", 4)
    source.done = [1, 2]  # resumed from the checkpoint of step 2
    assert ("reload", {}) in await taken(stream, "reload")
    source.done.append(3)
    assert [data["step"] for kind, data in await taken(stream, "step") if kind == "step"] == [3]
    await stream.aclose()  # type: ignore[attr-defined]


async def test_page_that_is_far_behind_reloads() -> None:
    source = Scripted(range(1, 5))
    one = running(source, 4)
    stream = one.events(4, lambda: False)
    await taken(stream, "services")
    late = one.events(0, lambda: False)
    assert ("reload", {}) in await taken(late, "reload")
    await stream.aclose()  # type: ignore[attr-defined]
    await late.aclose()  # type: ignore[attr-defined]


async def test_stream_ends_when_the_server_stops() -> None:
    stopping = False
    stream = running(Scripted(), -1).events(-1, lambda: stopping)
    await taken(stream, "services")
    stopping = True
    async with asyncio.timeout(5):
        assert [part async for part in stream] == []


async def test_page_that_is_closed_ends_no_other_page() -> None:
    """The server cancels the stream of a closed page again and again until it has ended."""
    feed = running(Scripted([1]), 0)

    async def read() -> None:
        async for _ in feed.events(0, lambda: False):
            pass

    staying = [asyncio.create_task(read()) for _ in range(3)]
    for number in range(100):
        leaving = [asyncio.create_task(read()) for _ in range(3)]
        for _ in range(number % 10 + 3):
            await asyncio.sleep(0)
        for one in leaving:
            while not one.done():
                one.cancel()
                await asyncio.sleep(0)
    assert [one for one in staying if one.done()] == []
    for one in staying:
        one.cancel()
    await asyncio.gather(*staying, return_exceptions=True)
