"""The metrics that Prometheus reads at /metrics: of this process, and of the store."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill import RunStatus
from gristmill.archive.writer import free_bytes

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0)


class Metrics:
    """The metrics of one process, in their own registry. Each of several API processes reports its own requests."""

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
        self.lost_runs = Gauge(
            "gristmill_api_lost_runs",
            "Runs that are open by their run.json, and that Redis has lost",
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
    """ASGI middleware: counts and times requests by route template, so ids do not become labels."""

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
        """Looked up once, because the library validates and sorts the labels at each look-up."""
        key = method, route, status
        if key not in self._children:
            self._children[key] = (
                self._metrics.requests.labels(method, route, status),
                self._metrics.latency.labels(method, route),
            )
        return self._children[key]


STATES: Final = ("ready", "leased", "dead")

GAUGES: Final[Sequence[tuple[str, str, Callable[[RunStatus], float | None]]]] = (
    ("stored_bytes", "Payload bytes held", lambda status: status.bytes),
    ("archiving_groups", "Trained groups that wait to be archived", lambda status: status.archiving),
    ("permits", "Permits out with environments", lambda status: status.outstanding),
    ("environments", "Registered environments that are alive", lambda status: status.envs),
    ("oldest_ready_seconds", "Age of the group at the head of the queue", lambda status: status.oldest_ready_s),
    (
        "oldest_ready_staleness",
        "Policy steps between that group and the newest weights",
        lambda status: status.oldest_ready_staleness,
    ),
)
COUNTERS: Final[Sequence[tuple[str, str, Callable[[RunStatus], int]]]] = (
    ("lease_expiries", "Leases that ran out", lambda status: status.lease_expiries),
    (
        "redeliveries",
        "Groups leased again after a lease of theirs ended without an ack",
        lambda status: status.redeliveries,
    ),
)


@dataclass(eq=False)
class StoreGauges(Collector):
    """The contents of the store. They are read from Redis at each scrape, so all API processes report the same.

    Set `runs` and `redis_info` before a scrape. Finished runs are left out, because their contents do not change.
    """

    runs: Mapping[str, RunStatus] = field(default_factory=dict)
    redis_info: Mapping[str, Any] = field(default_factory=dict)
    """Redis' INFO, sections memory and persistence; empty while Redis is away, or when INFO is not allowed."""

    def hide(self) -> None:
        self.runs, self.redis_info = {}, {}

    def collect(self) -> Iterator[Metric]:
        yield from self._by_state()
        yield from self._by_run()
        yield from self._redis()

    def _by_state(self) -> Iterator[Metric]:
        groups = GaugeMetricFamily("gristmill_api_groups", "Groups by state", labels=["run", "state"])
        sequences = GaugeMetricFamily("gristmill_api_sequences", "Their rollouts", labels=["run", "state"])
        size = GaugeMetricFamily("gristmill_api_group_bytes", "Their payload bytes", labels=["run", "state"])
        for run, status in self.runs.items():
            groups.add_metric([run, "trained"], status.trained)
            for state in STATES:
                groups.add_metric([run, state], getattr(status, state))
                sequences.add_metric([run, state], status.sequences[state])
                size.add_metric([run, state], status.bytes_by_state[state])
        yield from (groups, sequences, size)

    def _by_run(self) -> Iterator[Metric]:
        dropped = CounterMetricFamily("gristmill_api_dropped_groups", "Groups given up", labels=["run", "reason"])
        for run, status in self.runs.items():
            for reason, count in status.dropped.items():
                dropped.add_metric([run, reason], count)
        left_out = CounterMetricFamily(
            "gristmill_api_left_out_fields",
            "Groups of Atropos' clients that were stored without an optional field that did not fit their tokens",
            labels=["run", "field"],
        )
        for run, status in self.runs.items():
            for field_name, count in status.left_out.items():
                left_out.add_metric([run, field_name], count)
        yield from (dropped, left_out)
        for name, what, gauged in GAUGES:
            gauge = GaugeMetricFamily(f"gristmill_api_{name}", what, labels=["run"])
            for run, status in self.runs.items():
                gauge.add_metric([run], gauged(status) or 0)
            yield gauge
        for name, what, counted in COUNTERS:
            counter = CounterMetricFamily(f"gristmill_api_{name}", what, labels=["run"])
            for run, status in self.runs.items():
                counter.add_metric([run], counted(status))
            yield counter

    def _redis(self) -> Iterator[Metric]:
        for name, what, key in (
            ("memory_bytes", "Memory that Redis uses", "used_memory"),
            ("max_memory_bytes", "Its maxmemory; 0: unbounded", "maxmemory"),
            ("aof_bytes", "Size of its append-only file", "aof_current_size"),
        ):
            if key in self.redis_info:
                yield GaugeMetricFamily(f"gristmill_api_redis_{name}", what, value=self.redis_info[key])
        for name, what, key in (
            ("aof_rewrite_ok", "1 if the last rewrite of its append-only file succeeded", "aof_last_bgrewrite_status"),
            ("aof_write_ok", "1 if the last write to its append-only file succeeded", "aof_last_write_status"),
        ):
            if key in self.redis_info:
                yield GaugeMetricFamily(f"gristmill_api_redis_{name}", what, value=self.redis_info[key] == "ok")
        if "aof_delayed_fsync" in self.redis_info:
            yield CounterMetricFamily(
                "gristmill_api_redis_delayed_fsyncs",
                "Writes that Redis held back because an fsync was under way",
                value=self.redis_info["aof_delayed_fsync"],
            )
