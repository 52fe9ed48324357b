"""Keeps background tasks running: a task that fails is logged, visible at /metrics, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from gristmill_api.metrics import Metrics

_LOG = logging.getLogger(__name__)
_SHORTEST_S: Final = 0.5
_LONGEST_S: Final = 30.0
"""Pauses before a restart: each is twice the one before, until the task has run for longer than the longest."""


class Supervisor:
    """Tasks of one event loop. `stop` ends them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tasks: list[tuple[asyncio.Task[None], Callable[[], None] | None]] = []
        self._stopping = asyncio.Event()

    def start(self, name: str, work: Callable[[], Awaitable[None]], stop: Callable[[], None] | None = None) -> None:
        """Run `work` until it returns. `stop`: makes it return; None: `work` is cancelled."""
        self._tasks.append((asyncio.create_task(self._run(name, work), name=name), stop))

    async def stop(self) -> None:
        """End all tasks and wait for them."""
        self._stopping.set()
        for task, stop in self._tasks:
            if stop is None:
                task.cancel()
            else:
                stop()
        for task, _ in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        up, pause = self._metrics.task_up.labels(name), _SHORTEST_S
        while not self._stopping.is_set():
            started = time.monotonic()
            up.set(1)
            try:
                await work()
                return
            except Exception:  # noqa: BLE001  any error of the task: it is logged, counted and started again
                if time.monotonic() - started > _LONGEST_S:
                    pause = _SHORTEST_S
                _LOG.exception("THE BACKGROUND TASK %r FAILED; it starts again in %.1f s.", name, pause)
            finally:
                up.set(0)
            self._metrics.task_failures.labels(name).inc()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
            pause = min(2 * pause, _LONGEST_S)
