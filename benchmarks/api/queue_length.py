"""Redis commands and latency per call of status and lease, with 10 to 10,000 groups in the queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from benchmarks.api.clients import Http, Request, load
from benchmarks.api.interfaces import BATCH_GROUPS, NativeInterface
from benchmarks.api.payloads import Payload, Shape, make
from benchmarks.api.servers import Uvicorn

LENGTHS = (10, 100, 1000, 10_000)
SHAPE = Shape(2, 8)
"""The groups are small, because the measurement is about the queue."""
_FIRST = 2
"""Number of first calls that do not count, because in them the API connects to Redis and loads a script."""


@dataclass(frozen=True)
class Cost:
    """The cost of one kind of call with one length of the queue."""

    call: str
    ready: int
    """Groups in the queue at the time of the call."""
    commands: int
    """Redis commands per call, including commands inside scripts: the minimum over all calls. The API's archiver can
    only increase the number, because it renews its lock by a command every few seconds."""
    latencies: Sequence[float]
    """Seconds of each call."""


def run(api: Uvicorn, redis_url: str, calls: int, say: Callable[[str], None]) -> list[Cost]:
    """Fills a queue step by step. At each of LENGTHS, measures `calls` calls of status and `calls` leases."""
    payload = make(SHAPE, 0)
    interface = NativeInterface(api.port, SHAPE, "queue")
    interface.open()
    found, ready = list[Cost](), 0
    with redis.Redis.from_url(redis_url) as server:
        for length in LENGTHS:
            say(f"a queue of {length} groups")
            _submit(interface, payload, length - ready)
            ready = length
            http = Http(api.port)
            found.append(_status(server, interface, http, length, calls))
            found.append(_lease(server, interface, http, payload, length, calls))
            http.close()
    interface.prepare([], 0)
    interface.close()
    return found


def _submit(interface: NativeInterface, payload: Payload, count: int) -> None:
    http = Http(interface.port)
    rows = interface.permits(http, "bench", count)
    http.close()
    load([interface.submission("bench", row, payload) for row in rows], interface.port)


def _status(server: redis.Redis, interface: NativeInterface, http: Http, ready: int, calls: int) -> Cost:
    seen = [_counted(server, lambda: http.ok(Request("GET", f"{interface.at}/status"))) for _ in range(_FIRST + calls)]
    return _cost("status", ready, seen)


def _lease(
    server: redis.Redis, interface: NativeInterface, http: Http, payload: Payload, ready: int, calls: int
) -> Cost:
    seen = []
    for _ in range(_FIRST + calls):
        seen.append(_counted(server, lambda: interface.draw(http)))
        interface.settle(http)
        for row in interface.permits(http, "bench", BATCH_GROUPS):
            http.ok(interface.submission("bench", row, payload))
    return _cost(f"lease of {BATCH_GROUPS}", ready, seen)


def _cost(call: str, ready: int, seen: Sequence[tuple[int, float]]) -> Cost:
    counted = seen[_FIRST:]
    return Cost(call, ready, min(count for count, _ in counted), [latency for _, latency in counted])


def _counted(server: redis.Redis, call: Callable[[], Any]) -> tuple[int, float]:
    """Returns the number of Redis commands of a call, and the call's seconds."""
    server.config_resetstat()
    before = time.monotonic()
    call()
    latency = time.monotonic() - before
    stats: dict[str, Any] = server.info("commandstats")
    ours = ("cmdstat_config|resetstat", "cmdstat_info")
    return sum(stat["calls"] for name, stat in stats.items() if name not in ours), latency
