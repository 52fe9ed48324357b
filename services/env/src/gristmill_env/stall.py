"""Ends an environment whose event loop is blocked, so that its restart policy starts it again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gristmill.stall import StallGuard, StallLimits

STALL = StallLimits(floor=120, frozen=900)
"""No work on the loop takes seconds. If a reward's call holds the interpreter's lock, the reward's own limits end
the call if possible."""
_PULSE = 1.0
"""Seconds between two reports of progress."""


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[None]:
    """Ends the process if the loop is blocked for two minutes: exit code 70, and the stacks of all threads."""
    guard = StallGuard("environment", STALL)
    pulse = asyncio.create_task(_pulse(guard))
    try:
        yield
    finally:
        pulse.cancel()
        guard.close()


async def _pulse(guard: StallGuard) -> None:
    while True:
        guard.progress()
        await asyncio.sleep(_PULSE)
