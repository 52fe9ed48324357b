"""HTTP clients with minimal cost: requests are bytes made beforehand, and responses are read but not decoded.

The same code drives every server: `http.client` over a kept connection, with one client per process.
"""

from __future__ import annotations

import http.client
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Generic, TypeVar

T = TypeVar("T")

CLIENTS = 16
_FORK = multiprocessing.get_context("fork")
"""A forked child shares the payloads that its parent made."""


class UnexpectedAnswer(Exception):
    """A server sent an unexpected response, so its figures would mean nothing."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: tuple[bytes, ...] = ()
    """Pieces of the body, which the client sends one after the other."""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Load:
    """The times that many clients measured together."""

    seconds: float
    """Seconds from the first request of any client to the last response to any client."""
    latencies: list[float]
    """Seconds of each request."""


class Http:
    """One kept connection to a server on loopback."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def connect(self) -> None:
        self._connection.connect()

    def send(self, request: Request) -> Answer:
        size = str(sum(map(len, request.body)))
        self._connection.request(
            request.method, request.path, body=request.body, headers={"Content-Length": size, **request.headers}
        )
        answer = self._connection.getresponse()
        body = answer.read()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)

    def ok(self, request: Request) -> Answer:
        """Sends the request and returns the response, which must be a success."""
        answer = self.send(request)
        if not 200 <= answer.status < 300:
            raise UnexpectedAnswer(f"{request.method} {request.path}: {answer.status} {answer.body[:300]!r}")
        return answer

    def close(self) -> None:
        self._connection.close()


def load(requests: Sequence[Request], *ports: int) -> Load:
    """Sends all requests with CLIENTS clients at once. Each client sends its share one by one, to one of the ports."""
    shares = [requests[index::CLIENTS] for index in range(CLIENTS)]
    barrier = _FORK.Barrier(CLIENTS)

    def client(index: int) -> tuple[float, float, list[float]]:
        return _client(ports[index % len(ports)], shares[index], barrier)

    results = together(client, CLIENTS)
    return Load(
        max(ended for _, ended, _ in results) - min(started for started, _, _ in results),
        [latency for _, _, latencies in results for latency in latencies],
    )


def together(work: Callable[[int], T], processes: int) -> list[T]:
    """Runs `work(index)` in `processes` processes at once. Returns the result of each process."""
    started = [begin(work, index) for index in range(processes)]
    return [task.result() for task in started]


@dataclass
class Task(Generic[T]):
    """Work in a separate process."""

    process: multiprocessing.process.BaseProcess
    answers: Connection

    def result(self) -> T:
        try:
            value: T | BaseException = self.answers.recv()
        except EOFError as error:
            raise RuntimeError("a client process ended without a word") from error
        finally:
            self.process.join()
        if isinstance(value, BaseException):
            raise value
        return value


def begin(work: Callable[[int], T], index: int) -> Task[T]:
    """Starts `work(index)` in a separate process."""
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_run, args=(work, index, theirs), daemon=True)
    process.start()
    theirs.close()
    return Task(process, ours)


def _run(work: Callable[[int], T], index: int, answers: Connection) -> None:
    try:
        answers.send(work(index))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        answers.send(error)


def _client(port: int, requests: Sequence[Request], barrier: Barrier) -> tuple[float, float, list[float]]:
    """Returns (start of the first request, end of the last response, seconds of each request).

    Start and end are on the clock that all processes share.
    """
    http = Http(port)
    http.connect()
    latencies: list[float] = []
    barrier.wait(60)
    started = time.monotonic()
    for request in requests:
        before = time.monotonic()
        http.ok(request)
        latencies.append(time.monotonic() - before)
    ended = time.monotonic()
    http.close()
    return started, ended, latencies
