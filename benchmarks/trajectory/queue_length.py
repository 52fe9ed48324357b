"""Status and lease beside queues of 10 to 10,000 groups: how many Redis commands a call takes, and how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from benchmarks.trajectory.clients import Http, Request, load
from benchmarks.trajectory.doors import BATCH_GROUPS, NativeDoor
from benchmarks.trajectory.payloads import Payload, Shape, make
from benchmarks.trajectory.servers import Uvicorn

LENGTHS = (10, 100, 1000, 10_000)
SHAPE = Shape(2, 8)
"""Small groups: what is looked at is the queue."""
_FIRST = 2
"""Calls that do not count: the API connects to Redis and loads a script."""


@dataclass(frozen=True)
class Cost:
    """One kind of call beside a queue of one length."""

    call: str
    ready: int
    """Groups in the queue when it is called."""
    commands: int
    """Redis commands a call, those inside scripts included: the least seen. The API's archiver, which keeps its lock by
    a command every few seconds, can only add to it."""
    latencies: Sequence[float]
    """Seconds, one a call."""


def run(api: Uvicorn, redis_url: str, calls: int, say: Callable[[str], None]) -> list[Cost]:
    """Fill a queue step by step; at each of LENGTHS, `calls` calls of status and as many leases."""
    payload = make(SHAPE, 0)
    door = NativeDoor(api.port, SHAPE, "queue")
    door.open()
    found, ready = list[Cost](), 0
    with redis.Redis.from_url(redis_url) as server:
        for length in LENGTHS:
            say(f"a queue of {length} groups")
            _submit(door, payload, length - ready)
            ready = length
            http = Http(api.port)
            found.append(_status(server, door, http, length, calls))
            found.append(_lease(server, door, http, payload, length, calls))
            http.close()
    door.prepare([], 0)
    door.close()
    return found


def _submit(door: NativeDoor, payload: Payload, count: int) -> None:
    http = Http(door.port)
    rows = door.permits(http, "bench", count)
    http.close()
    load(door.port, [door.submission("bench", row, payload) for row in rows])


def _status(server: redis.Redis, door: NativeDoor, http: Http, ready: int, calls: int) -> Cost:
    seen = [_counted(server, lambda: http.ok(Request("GET", f"{door.at}/status"))) for _ in range(_FIRST + calls)]
    return _cost("status", ready, seen)


def _lease(server: redis.Redis, door: NativeDoor, http: Http, payload: Payload, ready: int, calls: int) -> Cost:
    seen = []
    for _ in range(_FIRST + calls):
        seen.append(_counted(server, lambda: door.draw(http)))
        door.settle(http)
        for row in door.permits(http, "bench", BATCH_GROUPS):
            http.ok(door.submission("bench", row, payload))
    return _cost(f"lease of {BATCH_GROUPS}", ready, seen)


def _cost(call: str, ready: int, seen: Sequence[tuple[int, float]]) -> Cost:
    counted = seen[_FIRST:]
    return Cost(call, ready, min(count for count, _ in counted), [latency for _, latency in counted])


def _counted(server: redis.Redis, call: Callable[[], Any]) -> tuple[int, float]:
    """Redis commands that a call took, and its seconds."""
    server.config_resetstat()
    before = time.monotonic()
    call()
    latency = time.monotonic() - before
    stats: dict[str, Any] = server.info("commandstats")
    ours = ("cmdstat_config|resetstat", "cmdstat_info")
    return sum(stat["calls"] for name, stat in stats.items() if name not in ours), latency
