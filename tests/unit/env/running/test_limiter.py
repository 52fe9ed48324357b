"""Calls within limits: how many threads they get, and how calls that overrun end."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import pytest

from gristmill_env.running import limiter
from gristmill_env.running.limiter import CallError, Limiter, Limits

pytestmark = pytest.mark.slow

PATIENT = Limits(cpu=600, wall=600)


def spin(until: threading.Event) -> str:
    while not until.is_set():
        pass
    return "done"


async def test_cheap_calls_run_in_order_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter, "_SLOW", 1000.0)  # none is, however busy the machine
    threads = set()

    def call(number: int) -> int:
        threads.add(threading.get_ident())
        return number

    found = await Limiter(PATIENT, 8).in_threads(partial(call, number) for number in range(50))
    assert found == list(range(50))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_calls_that_wait_run_at_the_same_time() -> None:
    together = threading.Barrier(20)
    await Limiter(PATIENT, 20).in_threads(partial(together.wait, 60) for _ in range(20))


async def test_calls_get_at_most_as_many_threads_as_there_are() -> None:
    running, most, let_go, enough = 0, 0, threading.Event(), asyncio.Event()
    loop, lock = asyncio.get_running_loop(), threading.Lock()

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if running == 3:
            loop.call_soon_threadsafe(enough.set)
        let_go.wait()
        with lock:
            running -= 1

    limited = Limiter(PATIENT, 3)
    groups = [asyncio.create_task(limited.in_threads([call] * 4)) for _ in range(3)]
    await enough.wait()
    let_go.set()
    await asyncio.gather(*groups)
    assert most == 3


async def test_plain_call_is_limited_by_its_processor_time_or_by_elapsed_time() -> None:
    end = threading.Event()
    for work, limits, limit in (
        (partial(spin, end), Limits(cpu=0.2, wall=600), "cpu"),
        (end.wait, Limits(cpu=600, wall=0.2), "wall"),
    ):
        limited = Limiter(limits, 8)
        first, second = await limited.in_threads([work, lambda: True])
        assert isinstance(first, CallError)
        assert (first.code, first.values) == ("call_overran", {"limit": limit, "seconds": 0.2})
        assert second is True
    end.set()


async def test_time_without_the_processor_is_no_processor_time() -> None:
    def sleeps() -> bool:
        time.sleep(1.0)
        return True

    assert await Limiter(Limits(cpu=0.3, wall=600), 8).in_threads([sleeps]) == [True]


async def test_async_calls_are_limited_by_elapsed_time_and_end() -> None:
    ended = asyncio.Event()

    async def waits() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async def quick() -> str:
        return "done"

    limited = Limiter(Limits(cpu=600, wall=0.2), 8)
    first, second = await limited.on_loop([waits(), quick()])
    assert isinstance(first, CallError)
    assert first.values == {"limit": "wall", "seconds": 0.2}
    assert second == "done"
    await ended.wait()
    assert not limited.hangs


async def test_cancelled_calls_end_or_do_not_begin() -> None:
    begun, let_go, ended = asyncio.Event(), threading.Event(), asyncio.Event()
    loop, called = asyncio.get_running_loop(), []

    def plain(number: int) -> None:
        called.append(number)
        loop.call_soon_threadsafe(begun.set)
        let_go.wait()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    limited = Limiter(PATIENT, 1)
    running = [
        asyncio.create_task(limited.in_threads(partial(plain, number) for number in range(5))),
        asyncio.create_task(limited.on_loop([waits()])),
    ]
    await begun.wait()
    for task in running:
        task.cancel()
    assert await asyncio.gather(*running, return_exceptions=True)
    await ended.wait()
    let_go.set()
    assert await limited.in_threads([lambda: "next"]) == ["next"]
    assert called == [0]


async def test_a_call_that_does_not_end_after_its_limit_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, left = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def call() -> None:
        let_go.wait()
        loop.call_soon_threadsafe(left.set)

    limited = Limiter(Limits(cpu=600, wall=0.1), 8)
    await limited.in_threads([call])
    while not limited.hangs:  # noqa: ASYNC110  it is measured, and no event
        await asyncio.sleep(0.01)
    let_go.set()
    await left.wait()
    while limited.hangs:  # noqa: ASYNC110  the thread ends
        await asyncio.sleep(0.01)


async def test_results_that_wait_behind_a_blocked_loop_are_in_time() -> None:
    async def blocks() -> bool:
        await asyncio.sleep(0.1)
        time.sleep(0.6)  # noqa: ASYNC251
        return True

    async def waits() -> bool:
        await asyncio.sleep(0.2)
        return True

    assert await Limiter(Limits(cpu=600, wall=0.3), 8).on_loop([blocks(), waits()]) == [True, True]
