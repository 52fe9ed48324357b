"""The background tasks: the supervisor that starts failed tasks again, the task that deletes old runs, and the task
that logs at which addresses the process listens."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from redis.exceptions import RedisError

from gristmill.internal.backoff import Backoff
from gristmill.internal.logs import line
from gristmill_api.access.settings import AccessSettings
from gristmill_api.metrics import Metrics
from gristmill_api.store import Store

_LOG = logging.getLogger(__name__)
_SHORTEST_S: Final = 0.5
_LONGEST_S: Final = 30.0
"""Pauses before a restart. They begin again with the shortest when the task has run for longer than the longest."""
_CANCEL_AGAIN_S: Final = 1.0
_RETENTION_PAUSE_S: Final = 60.0
_DESCRIPTORS: Final = Path("/dev/fd")  # Linux and macOS
_ADDRESS_PAUSE_S: Final = 0.1
_ADDRESS_CHECKS: Final = 100


class Supervisor:
    """The tasks of one event loop. A task that fails is logged, counted at /metrics, and started again."""

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
        for task, stop in self._tasks:
            # Again, because `asyncio.wait_for` of Python 3.11 may swallow a cancellation.
            while not (await asyncio.wait([task], timeout=_CANCEL_AGAIN_S))[0]:
                if stop is None:
                    task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        up, backoff = self._metrics.task_up.labels(name), Backoff(_SHORTEST_S, _LONGEST_S)
        while not self._stopping.is_set():
            started = time.monotonic()
            up.set(1)
            try:
                await work()
                return
            except Exception:  # noqa: BLE001  any error of the task: it is logged, counted and started again
                if time.monotonic() - started > _LONGEST_S:
                    backoff.reset()
                pause = backoff.next()
                _LOG.exception("THE BACKGROUND TASK %r FAILED; it starts again in %.1f s.", name, pause)
            finally:
                up.set(0)
            self._metrics.task_failures.labels(name).inc()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)


async def keep_retention(store: Store, retention_s: float) -> None:
    """Delete runs that finished more than `retention_s` seconds ago, every minute, until it is cancelled; and continue
    deletions that were interrupted. 0: finished runs stay. Several processes may each run one."""
    while True:
        try:
            for run_id in await store.runs.delete_old(retention_s):
                _LOG.info(line("delete", run=run_id, by="retention"))
        except RedisError as error:
            # The task that watches Redis reports that it is away.
            _LOG.debug(line("retention", why=str(error)))
        await asyncio.sleep(_RETENTION_PAUSE_S)


async def report_addresses(settings: AccessSettings) -> None:
    """Log the addresses once the process listens. Warn if other machines reach the API and need no token.

    The server binds after the application has started, and does not report the address to the application. So this
    function reads the process' own listening sockets, which are right for --host, --fd, a reloader and several workers.
    """
    for _ in range(_ADDRESS_CHECKS):
        addresses = listening()
        if addresses:
            break
        # No event reports that the server has bound its port. It binds right after the application's start.
        await asyncio.sleep(_ADDRESS_PAUSE_S)
    else:
        return
    at = ",".join(f"{host}:{port}" for host, port in addresses)
    _LOG.info(line("api", listens=at, auth=settings.auth))
    private = settings.in_compose or all(_loopback(host) for host, _ in addresses)
    if settings.tokens is None and not private:
        _LOG.warning(
            "THE API IS OPEN TO THE NETWORK: it listens at %s and API_AUTH is none, so any client that reaches that "
            "port can read, submit and delete. Bind the API to 127.0.0.1, or turn on tokens: make secure "
            "(docs/security.md).",
            at,
        )


def listening() -> list[tuple[str, int]]:
    """Returns the addresses at which this process accepts TCP connections; empty if the system does not list them."""
    ports = []
    for descriptor in _descriptors():
        # A descriptor may be closed meanwhile. The descriptor that listed the folder is.
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as here:
                internet = here.family in (socket.AF_INET, socket.AF_INET6)
                if internet and here.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    host, port = here.getsockname()[:2]
                    ports.append((host, port))
    return ports


def _descriptors() -> list[int]:
    return [int(entry.name) for entry in _DESCRIPTORS.iterdir()] if _DESCRIPTORS.is_dir() else []


def _loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
