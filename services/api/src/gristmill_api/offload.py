"""Work on large bodies happens on threads, so that the event loop answers other requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Args = TypeVarTuple("Args")

IN_LOOP: Final = 64 * 1024
"""Bytes. Work on this much takes less time than the way to a thread and back is worth."""


async def offload(size: int, work: Callable[[Unpack[Args]], T], *args: *Args) -> T:
    """`work(*args)`: on a thread if `size`, the bytes to work on, is more than IN_LOOP."""
    if size <= IN_LOOP:
        return work(*args)
    return await asyncio.to_thread(work, *args)
