"""The API's memory while gigabytes go through it, and Redis' memory compared with the bytes it stores."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import redis
from benchmarks.api.clients import CLIENTS, Http, Request, UnexpectedAnswer, begin, load
from benchmarks.api.interfaces import BATCH_GROUPS, AtroposInterface, NativeInterface
from benchmarks.api.payloads import Payload, Shape, make
from benchmarks.api.servers import Uvicorn
from benchmarks.machine import peak_rss, rss

SHAPE = Shape(16, 4096)
TENTHS = 10
"""Number of times that a push measures the API's memory."""
PERMITS = 64
"""Permits that a client requests at once."""


@dataclass(frozen=True)
class Push:
    """The bytes that went through the API, and the memory during that time, in bytes."""

    interface: str
    pushed: int
    seconds: float
    idle: int
    """The API's resident memory before the first group."""
    resident: Sequence[int]
    """The API's resident memory after each tenth of the bytes."""
    peak: int
    """The API's peak resident memory, as the kernel counts it."""
    redis_peak: int
    refused: int
    """Submits that the API asked to repeat: with status 429, or 503 at the Atropos-compatible endpoints."""


class Feed(Protocol):
    """An interface that receives groups without end."""

    name: str

    def groups(self, http: Http, index: int) -> Iterator[Request]:
        """Yields the submits of client `index`."""

    def drain(self, http: Http) -> bool:
        """Takes a batch off the queue and finishes it. Returns False if the queue held less than a batch."""


class NativeFeed:
    def __init__(self, port: int, payloads: Sequence[Payload]) -> None:
        self._interface = NativeInterface(port, SHAPE, "push")
        self._interface.open()
        self._payloads = payloads
        self.name = self._interface.name

    def groups(self, http: Http, index: int) -> Iterator[Request]:
        holder, contents = f"env-{index}", itertools.cycle(self._payloads)
        while True:
            for row in self._interface.permits(http, holder, PERMITS):
                yield self._interface.submission(holder, row, next(contents))

    def drain(self, http: Http) -> bool:
        if self._interface.lease(http, BATCH_GROUPS, wait=1.0).status != 200:
            return False
        self._interface.settle(http)
        return True


class CompatibleFeed:
    def __init__(self, port: int, payloads: Sequence[Payload]) -> None:
        self._interface = AtroposInterface("compatible", port, SHAPE, gzipped=False)
        self._requests = self._interface.prepare(payloads, len(payloads))
        self.name = self._interface.name

    def groups(self, http: Http, index: int) -> Iterator[Request]:
        return itertools.cycle(self._requests)

    def drain(self, http: Http) -> bool:
        if self._interface.draw(http).body != b'{"batch":null}':
            return True
        time.sleep(0.1)  # this protocol has no way to wait for a batch
        return False


def push(api: Uvicorn, redis_url: str, feed: Feed, total: int, say: Callable[[str], None]) -> Push:
    """Submits `total` bytes of groups with all clients while one client takes batches off the queue."""
    sent = multiprocessing.Value("q", 0)
    refused = multiprocessing.Value("q", 0)
    ended = multiprocessing.Event()
    idle, started = rss(api.pid), time.monotonic()
    resident: list[int] = []

    def submitter(index: int) -> None:
        http = Http(api.port)
        for request in feed.groups(http, index):
            size = _submit(http, request, refused)
            with sent.get_lock():
                sent.value += size
                if sent.value >= total:
                    return

    def trainer(_: int) -> None:
        http = Http(api.port)
        while feed.drain(http) or not ended.is_set():
            pass

    training = begin(trainer, 0)
    submitting = [begin(submitter, index) for index in range(CLIENTS)]
    while any(task.process.is_alive() for task in submitting):
        time.sleep(0.1)
        if len(resident) < TENTHS and sent.value >= total * (len(resident) + 1) / TENTHS:
            resident.append(rss(api.pid))
            speed = sent.value / (time.monotonic() - started) / 1e6
            say(f"{feed.name}: {sent.value / 1e9:.2f} GB, {speed:.0f} MB/s, API {resident[-1] / 1e6:.0f} MB resident")
    for task in submitting:
        task.result()
    seconds = time.monotonic() - started
    ended.set()
    training.result()
    peak = int(_memory(redis_url)["used_memory_peak"])
    return Push(feed.name, sent.value, seconds, idle, resident, peak_rss(api.pid), peak, refused.value)


def _submit(http: Http, request: Request, refused: Any) -> int:
    """Sends a group until the API has stored it. Returns the bytes of the last request."""
    while (answer := http.send(request)).status in (429, 503):
        with refused.get_lock():
            refused.value += 1
        time.sleep(0.2)
    if answer.status not in (200, 201):
        raise UnexpectedAnswer(f"{request.path}: {answer.status} {answer.body[:300]!r}")
    return sum(map(len, request.body))


@dataclass(frozen=True)
class Stored:
    """Redis' memory while it holds groups that no trainer has leased."""

    shape: Shape
    groups: int
    payload_bytes: int
    redis_bytes: int
    """Increase of used_memory since before the first group."""

    @property
    def ratio(self) -> float:
        return self.redis_bytes / self.payload_bytes


def store(api: Uvicorn, redis_url: str, shape: Shape, total: int) -> Stored:
    """Submits about `total` bytes of groups, measures Redis' memory, and removes the groups."""
    payloads = [make(shape, seed) for seed in range(4)]
    interface = NativeInterface(api.port, shape, f"stored-{shape.sequences}-{shape.tokens}-{total}")
    interface.open()
    count = -(-total // payloads[0].native_size)
    before = int(_memory(redis_url)["used_memory"])
    requests = interface.prepare(payloads, count)
    load(requests, api.port)
    held = int(_memory(redis_url)["used_memory"]) - before
    interface.prepare(payloads, 0)
    interface.close()
    return Stored(shape, count, sum(sum(map(len, request.body)) for request in requests), held)


def _memory(redis_url: str) -> dict[str, Any]:
    with redis.Redis.from_url(redis_url) as client:
        found: dict[str, Any] = client.info("memory")
        return found
