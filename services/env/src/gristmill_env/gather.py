"""Runs several coroutines at a time, as one call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns all results, in order. If one raises, cancels the others and raises that error, not an error group.

    asyncio.TaskGroup of Python 3.11 would leave the caller marked as cancelled after an error, and a time limit around
    the call would then raise CancelledError instead of TimeoutError.
    """
    running = [asyncio.ensure_future(one) for one in work]
    if not running:
        return []
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        errors = [task.exception() for task in running if task.done() and not task.cancelled()]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    for error in errors:
        if error is not None:
            raise error
    return [task.result() for task in running]
