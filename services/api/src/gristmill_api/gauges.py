"""What the store holds, for Prometheus: read from Redis at each scrape, so that all API processes tell the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gristmill import RunStatus

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
    """Set `runs` and `redis_info` before a scrape. Runs that are over are left out: what they hold does not change."""

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
        sequences = GaugeMetricFamily("gristmill_api_sequences", "Their sequences", labels=["run", "state"])
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
            ("max_memory_bytes", "Its maxmemory; 0 is no bound", "maxmemory"),
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
