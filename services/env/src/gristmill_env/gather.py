"""Runs several coroutines at a time, as one call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns all results, in order. If one raises, cancels the others and raises that error, not an error group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    return [task.result() for task in running]


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first single error in a group of errors and groups."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
