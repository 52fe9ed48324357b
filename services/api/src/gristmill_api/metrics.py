"""The metrics that Prometheus reads at /metrics: of this process, and of the store. docs/metrics.md explains them."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill import RunStatus
from gristmill.internal.archive_writer import free_bytes
from gristmill.internal.metrics import Kind
from gristmill.internal.prometheus import Exported

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0)


def _row(name: str, meaning: str, *labels: str, kind: Kind = Kind.GAUGE) -> Exported:
    return Exported(f"gristmill_api_{name}", meaning, kind, labels)


def _count(name: str, meaning: str, *labels: str) -> Exported:
    return _row(name, meaning, *labels, kind=Kind.COUNTER)


METRICS: Final = {
    row.name.removeprefix("gristmill_api_"): row
    for row in (
        _count("requests", "answered requests", "method", "route", "status"),
        _row("request_seconds", "seconds to the whole answer; long-polls include their waiting; a histogram", "method",
            "route", kind=Kind.HISTOGRAM),
        _count("submits", "submitted groups: `stored`, `duplicate`, or an error's code", "outcome"),
        _row("body_bytes", "bytes of request bodies over 64 KiB that are in memory, with their inflated copies"),
        _row("task_up", "1 while the background task runs: `watch-redis` wakes waiting requests, `archive` writes "
            "trained groups, `run-files` writes run.json, `reports` writes report.html, `retention` deletes old runs",
            "task"),
        _count("task_failures", "errors that ended a background task, which was started again", "task"),
        _row("redis_up", "1 while Redis answers"),
        _row("lost_runs", "runs that are open by their `run.json`, and that Redis has lost"),
        _count("archive_lost", "trained groups that were let go without being archived: the disk could not be written"),
        _row("archive_free_bytes", "free space on the archive's disk"),
        _row("groups", "groups that are `ready`, `leased`, `dead` or `trained`", "run", "state"),
        _row("sequences", "sequences of the ready, leased and dead groups; a rollout with branches counts once", "run",
            "state"),
        _row("group_bytes", "payload bytes of the ready, leased and dead groups", "run", "state"),
        _row("stored_bytes", "payload bytes of a run in the store", "run"),
        _row("archiving_groups", "trained groups that wait to be archived", "run"),
        _row("permits", "permits that environments hold", "run"),
        _row("environments", "registered environments that are alive", "run"),
        _row("oldest_ready_seconds", "age of the group at the head of the queue", "run"),
        _row("oldest_ready_staleness", "steps between that group and the newest weights", "run"),
        _count("dropped_groups", "groups given up, by reason, over all environments", "run", "reason"),
        _row("rows", "data rows whose mean reward is `below`, `within` or `above` the band of the curriculum",
            "run", "place"),
        _count("rows_passed_over", "turns of rows that rested", "run"),
        _count("lease_expiries", "leases that ran out", "run"),
        _count("redeliveries", "groups that were leased again after a lease ended without an ack", "run"),
        _count("left_out_fields", "groups of Atropos' clients that were stored without an optional field that did not "
            "fit their tokens", "run", "field"),
        _row("redis_memory_bytes", "memory that Redis uses"),
        _row("redis_max_memory_bytes", "its `maxmemory`; 0 is without a limit"),
        _row("redis_aof_bytes", "size of its append-only file"),
        _row("redis_aof_write_ok", "1 if the last write to the append-only file succeeded"),
        _row("redis_aof_rewrite_ok", "1 if the last rewrite of the file succeeded"),
        _count("redis_delayed_fsyncs", "writes that Redis held back because an fsync was under way"),
    )
}  # fmt: skip


class Metrics:
    """The metrics of one process, in their own registry. Each of several API processes reports its own requests."""

    def __init__(self, archive_dir: Path | None = None) -> None:
        """`archive_dir`: the folder whose disk's free space is exported."""
        self.registry: Final = CollectorRegistry()
        self.requests: Counter = METRICS["requests"].create(self.registry)
        self.latency: Histogram = METRICS["request_seconds"].create(self.registry, buckets=_LATENCY_S)
        self.submits: Counter = METRICS["submits"].create(self.registry)
        self.body_bytes: Gauge = METRICS["body_bytes"].create(self.registry)
        self.store = StoreGauges()
        self.registry.register(self.store)
        self.archive_lost: Counter = METRICS["archive_lost"].create(self.registry)
        self.lost_runs: Gauge = METRICS["lost_runs"].create(self.registry)
        if archive_dir is not None:
            free: Gauge = METRICS["archive_free_bytes"].create(self.registry)
            free.set_function(functools.partial(_free_bytes, archive_dir))
        self.task_up: Gauge = METRICS["task_up"].create(self.registry)
        self.task_failures: Counter = METRICS["task_failures"].create(self.registry)
        self.redis_up: Gauge = METRICS["redis_up"].create(self.registry)

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

_Samples = Iterable[tuple[Sequence[str], float | None]]
_BY_RUN: Final[Mapping[str, Callable[[RunStatus], _Samples]]] = {
    "groups": lambda run: [(["trained"], run.trained), *(([state], getattr(run, state)) for state in STATES)],
    "sequences": lambda run: [([state], run.sequences[state]) for state in STATES],
    "group_bytes": lambda run: [([state], run.bytes_by_state[state]) for state in STATES],
    "dropped_groups": lambda run: [([reason], count) for reason, count in run.dropped.items()],
    "left_out_fields": lambda run: [([field], count) for field, count in run.left_out.items()],
    "stored_bytes": lambda run: [([], run.bytes)],
    "archiving_groups": lambda run: [([], run.archiving)],
    "permits": lambda run: [([], run.outstanding)],
    "environments": lambda run: [([], run.envs)],
    "oldest_ready_seconds": lambda run: [([], run.oldest_ready_s)],
    "oldest_ready_staleness": lambda run: [([], run.oldest_ready_staleness)],
    "rows": lambda run: [([place], count) for place, count in run.rows.items()],
    "rows_passed_over": lambda run: [([], run.rows_passed_over)],
    "lease_expiries": lambda run: [([], run.lease_expiries)],
    "redeliveries": lambda run: [([], run.redeliveries)],
}
_OF_REDIS: Final = {
    "redis_memory_bytes": "used_memory",
    "redis_max_memory_bytes": "maxmemory",
    "redis_aof_bytes": "aof_current_size",
    "redis_aof_rewrite_ok": "aof_last_bgrewrite_status",
    "redis_aof_write_ok": "aof_last_write_status",
    "redis_delayed_fsyncs": "aof_delayed_fsync",
}
"""Keys of Redis' INFO."""


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
        for name, samples in _BY_RUN.items():
            yield METRICS[name].family(
                ([run, *labels], value or 0) for run, status in self.runs.items() for labels, value in samples(status)
            )
        for name, key in _OF_REDIS.items():
            if (value := self.redis_info.get(key)) is not None:
                yield METRICS[name].family([([], value == "ok" if key.endswith("_status") else value)])
