"""The end of the API's background tasks."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

from gristmill_api import background


async def test_task_that_swallows_a_cancellation_is_cancelled_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(background, "_CANCEL_AGAIN_S", 0.01)
    began, swallowed = asyncio.Event(), []

    async def work() -> None:
        while True:
            began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # as `asyncio.wait_for` of Python 3.11 may do
                swallowed.append(1)
                if len(swallowed) > 2:
                    raise

    supervisor = background.Supervisor(mock.MagicMock())
    supervisor.start("work", work)
    await began.wait()
    await asyncio.wait_for(supervisor.stop(), 60)
    assert len(swallowed) == 3
