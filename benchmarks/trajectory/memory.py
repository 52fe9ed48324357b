"""Memory: the API's while gigabytes go through it, and Redis' beside the bytes it stores."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from benchmarks.trajectory.clients import CLIENTS, Http, Request, begin, load
from benchmarks.trajectory.doors import NativeDoor
from benchmarks.trajectory.payloads import Shape, make
from benchmarks.trajectory.processes import peak_rss, rss
from benchmarks.trajectory.servers import Uvicorn

SHAPE = Shape(16, 4096)
LEASED_GROUPS = 16
"""Groups a batch while pushing."""
PERMITS = 64
"""Permits a client asks for at once."""


@dataclass(frozen=True)
class Push:
    """What went through the API, and what it held meanwhile. Bytes."""

    door: str
    pushed: int
    seconds: float
    idle: int
    """Resident before the first group."""
    resident: Sequence[int]
    """Resident each time another tenth was through."""
    peak: int
    """The most that was ever resident, as the kernel counts it."""
    redis_peak: int
    refused: int
    """Submits that heard 429 and came again."""


def push(api: Uvicorn, redis_url: str, total: int, say: Callable[[str], None]) -> Push:
    """Submit `total` bytes of groups with all clients while a trainer leases and acks them."""
    payloads = [make(SHAPE, seed) for seed in range(4)]
    door = NativeDoor(api.port, SHAPE, "push")
    door.open()
    sent = multiprocessing.Value("q", 0)
    refused = multiprocessing.Value("q", 0)
    ended = multiprocessing.Event()
    idle, started = rss(api.pid), time.monotonic()
    resident: list[int] = []

    def submitter(index: int) -> None:
        http, holder = Http(api.port), f"env-{index}"
        contents = itertools.cycle(payloads)
        while sent.value < total:
            for row in door.permits(http, holder, PERMITS):
                size = _submit(http, door.submission(holder, row, next(contents)), refused)
                with sent.get_lock():
                    sent.value += size

    def trainer(_: int) -> None:
        http = Http(api.port)
        while door.lease(http, LEASED_GROUPS, wait=1.0).status == 200 or not ended.is_set():
            door.settle(http)

    training = begin(trainer, 0)
    submitting = [begin(submitter, index) for index in range(CLIENTS)]
    while any(task.process.is_alive() for task in submitting):
        time.sleep(0.2)
        if sent.value >= total * (len(resident) + 1) / 10:
            resident.append(rss(api.pid))
            speed = sent.value / (time.monotonic() - started)
            say(f"{sent.value / 1e9:.2f} GB pushed, {speed / 1e6:.0f} MB/s, API {resident[-1] / 1e6:.0f} MB resident")
            if len(resident) == 10:
                break
    for task in submitting:
        task.result()
    seconds = time.monotonic() - started
    ended.set()
    training.result()
    door.close()
    peak = int(_memory(redis_url)["used_memory_peak"])
    return Push(door.name, sent.value, seconds, idle, resident, peak_rss(api.pid), peak, refused.value)


def _submit(http: Http, request: Request, refused: Any) -> int:
    """Send until stored. Returns the bytes sent last."""
    while (answer := http.send(request)).status == 429:
        with refused.get_lock():
            refused.value += 1
        time.sleep(0.2)
    if answer.status != 201:
        raise RuntimeError(f"{request.path}: {answer.status} {answer.body[:300]!r}")
    return sum(map(len, request.body))


@dataclass(frozen=True)
class Stored:
    """Redis' memory while it holds groups that nobody has leased."""

    shape: Shape
    groups: int
    payload_bytes: int
    redis_bytes: int
    """used_memory less what it was before the first group."""

    @property
    def ratio(self) -> float:
        return self.redis_bytes / self.payload_bytes


def store(api: Uvicorn, redis_url: str, shape: Shape, total: int) -> Stored:
    """Submit about `total` bytes of groups, look, and take them away again."""
    payloads = [make(shape, seed) for seed in range(4)]
    door = NativeDoor(api.port, shape, f"stored-{shape.sequences}-{shape.tokens}-{total}")
    door.open()
    count = -(-total // payloads[0].native_size)
    before = int(_memory(redis_url)["used_memory"])
    requests = door.prepare(payloads, count)
    load(api.port, requests)
    held = int(_memory(redis_url)["used_memory"]) - before
    door.prepare(payloads, 0)
    door.close()
    return Stored(shape, count, sum(sum(map(len, request.body)) for request in requests), held)


def _memory(redis_url: str) -> dict[str, Any]:
    with redis.Redis.from_url(redis_url) as client:
        found: dict[str, Any] = client.info("memory")
        return found
