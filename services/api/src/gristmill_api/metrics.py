"""What Prometheus reads at /metrics."""

from __future__ import annotations

import functools
import math
import time
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill_api.archive.writer import free_bytes
from gristmill_api.gauges import StoreGauges

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0)


class Metrics:
    """One process' metrics in a registry of their own. With several API processes each tells its own requests."""

    def __init__(self, archive_dir: Path | None = None) -> None:
        """`archive_dir`: the folder whose disk's free space is exported."""
        self.registry: Final = CollectorRegistry()
        self.requests = Counter(
            "gristmill_api_requests", "Requests answered", ["method", "route", "status"], registry=self.registry
        )
        self.latency = Histogram(
            "gristmill_api_request_seconds",
            "Time to the whole answer; long-polls include their waiting",
            ["method", "route"],
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.submits = Counter(
            "gristmill_api_submits",
            "Submitted groups by outcome: stored, duplicate, or the error's code",
            ["outcome"],
            registry=self.registry,
        )
        self.body_bytes = Gauge(
            "gristmill_api_body_bytes",
            "Bytes of request bodies over 64 KiB that are in memory, with their inflated copies",
            registry=self.registry,
        )
        self.store = StoreGauges()
        self.registry.register(self.store)
        self.archive_lost = Counter(
            "gristmill_api_archive_lost",
            "Trained groups that were let go without being archived: the disk could not be written",
            registry=self.registry,
        )
        if archive_dir is not None:
            free = Gauge("gristmill_api_archive_free_bytes", "Free space on the archive's disk", registry=self.registry)
            free.set_function(functools.partial(_free_bytes, archive_dir))
        self.task_up = Gauge(
            "gristmill_api_task_up",
            "1 while the background task runs: watch-redis wakes waiting requests, archive writes trained groups, "
            "retention deletes old runs",
            ["task"],
            registry=self.registry,
        )
        self.task_failures = Counter(
            "gristmill_api_task_failures",
            "Errors that ended a background task; it was started again",
            ["task"],
            registry=self.registry,
        )
        self.redis_up = Gauge("gristmill_api_redis_up", "1 while Redis answers", registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _free_bytes(folder: Path) -> float:
    try:
        return free_bytes(folder)
    except OSError:
        return math.nan


class CountRequests:
    """ASGI middleware: counts and times requests by route template, so that ids make no labels."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        started = time.perf_counter()

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            counter, latency = self._of(scope["method"], getattr(scope.get("route"), "path", "unmatched"), status)
            counter.inc()
            latency.observe(time.perf_counter() - started)

    def _of(self, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
        """Looked up once: the library validates and sorts the labels at each look."""
        key = method, route, status
        if key not in self._children:
            self._children[key] = (
                self._metrics.requests.labels(method, route, status),
                self._metrics.latency.labels(method, route),
            )
        return self._children[key]
