"""Several coroutines as one call: results in order, the first error, and no effect on the caller."""

from __future__ import annotations

import asyncio

import pytest

from gristmill_env.gather import gather


async def _waits() -> int:
    await asyncio.Event().wait()
    return 0


async def _fails(text: str) -> int:
    await asyncio.sleep(0)
    raise ValueError(text)


async def test_results_are_in_order() -> None:
    first = asyncio.Event()

    async def waits() -> int:
        await first.wait()
        return 0

    async def returns() -> int:
        first.set()
        return 1

    assert await gather([waits(), returns()]) == [0, 1]
    assert await gather([]) == []


async def test_error_ends_the_others_and_is_raised_itself() -> None:
    others = asyncio.Event()

    async def other() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            others.set()
        return 0

    with pytest.raises(ValueError, match="broken"):
        await gather([other(), _fails("broken")])
    assert others.is_set()


async def test_time_limit_around_a_failed_call_is_still_a_timeout() -> None:
    async def fails_and_waits() -> None:
        with pytest.raises(ValueError, match="broken"):
            await gather([_fails("broken"), _waits()])
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await fails_and_waits()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_cancelled_caller_ends_its_calls() -> None:
    ended = []
    started = asyncio.Event()

    async def one() -> int:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.append(1)
        return 0

    task = asyncio.create_task(gather([one(), one()]))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [1, 1]
