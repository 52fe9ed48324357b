"""Bounds the size of each request body, and the memory that all bodies take together.

Starlette has a middleware for the size of one body. It answers in plain text, and every error of this API is JSON.
Work on a large body happens on a thread, so that the event loop answers other requests meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar, TypeVarTuple, Unpack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill_api import errors

T = TypeVar("T")
Args = TypeVarTuple("Args")

UNCOUNTED: Final = 64 * 1024
"""Bytes. A body of this size is not counted in `Bodies`."""
IN_LOOP: Final = 512 * 1024
"""Bytes. On two cores of an EPYC, to check and hash a native group of this size takes 0.5 ms. To inflate as much gzip
takes 1 ms, and to read as much of Atropos' JSON 2 ms. A thread adds 0.4 ms, three times the check of a group of
67 kB."""
_THREADS: Final = ThreadPoolExecutor(2, "body")
"""Threads that read large bodies. Reading needs Python's lock, so a third thread would only take memory: several times
the body. While one thread inflates or hashes, which needs no lock, the other one reads."""
MOST_LISTS: Final = 1 << 20
"""Most lists and objects in a JSON body. One takes 90 bytes of memory, and as few as 3 bytes of the body, so the length
of a body alone does not limit the memory that reading takes."""
_WAIT_S: Final = 10.0
"""Seconds that a request waits for room before it is refused. The client keeps the body meanwhile."""
_SLOWEST: Final = 16 * 1024
"""Bytes per second. A body may fall behind this speed by `timeout` seconds. What arrived faster earns no later pause: a
client could otherwise send most of several bodies at once, and keep the room of all others for an hour."""
_KEY: Final = "gristmill.body"


async def offload(size: int, work: Callable[[Unpack[Args]], T], *args: *Args) -> T:
    """Returns `work(*args)`, run on a thread if `size`, the bytes to work on, is more than IN_LOOP."""
    if size <= IN_LOOP:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *args)


def lists(body: bytes) -> int:
    """Returns the number of lists and objects in JSON, and of such brackets in its strings."""
    return body.count(b"[") + body.count(b"{")


class Bodies:
    """Counts the bytes of request bodies that are in memory, with their inflated copies. Lives on one event loop.

    A body counts the bytes that have arrived, not the length that it announces: a request that sends nothing takes no
    room from others. Bodies up to 64 KiB (UNCOUNTED) are not counted. The oldest counted body always finds room, so
    bodies that have arrived in part cannot wait for one another. All bodies together take at most `limit` bytes and one
    body more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._ages = itertools.count()
        self._counted: dict[int, int] = {}
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def held(self) -> int:
        return self._held

    def join(self) -> int:
        """Returns the age of a new request. Older requests have smaller numbers."""
        age = next(self._ages)
        self._counted[age] = 0
        return age

    def leave(self, age: int) -> None:
        """Release all bytes of the request."""
        self._held -= self._counted.pop(age)
        self._admit_waiting()

    async def admit(self, size: int, age: int) -> None:
        """Count `size` more bytes as soon as there is room, for older requests first. Raises ApiProblem (503)."""
        if not self._waiting and self._fits(size, age):
            self._count(size, age)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (age, size, turn)
        insort(self._waiting, waiting, key=lambda entry: entry[0])
        self._admit_waiting()
        try:
            async with asyncio.timeout(_WAIT_S):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release(size, age)  # It was admitted in the same moment.
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                self._admit_waiting()
            if isinstance(error, TimeoutError):
                raise errors.too_many_bodies(self._limit) from error
            raise

    def grow(self, size: int, age: int) -> None:
        """Count `size` more bytes of a request. Raises ApiProblem (503) at once: a request that waited here would hold
        memory that other requests wait for."""
        if self._held + size > self._limit and self._held > self._counted[age]:
            raise errors.too_many_bodies(self._limit)
        self._count(size, age)

    def release(self, size: int, age: int) -> None:
        self._count(-size, age)
        self._admit_waiting()

    def _count(self, size: int, age: int) -> None:
        self._counted[age] += size
        self._held += size

    def _admit_waiting(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1], self._waiting[0][0]):
            age, size, turn = self._waiting.pop(0)
            if not turn.done():  # Else its wait has ended, and its request learns of it in the next turn of the loop.
                self._count(size, age)
                turn.set_result(None)

    def _fits(self, size: int, age: int) -> bool:
        return self._held + size <= self._limit or age == next(iter(self._counted))


class Reservation:
    """The bytes that one request has counted in `Bodies`: its body, and the copy that the body inflates to."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._age: int | None = None
        self._body = 0
        self._copy = 0

    async def admit(self, size: int) -> None:
        """Count a body of `size` bytes in place of its previous size, as Bodies.admit."""
        more = size - self._body
        await self._bodies.admit(more, self._joined())
        self._body += more

    def set_copy(self, size: int) -> None:
        """Count a copy of `size` bytes in place of the previous copy, as Bodies.grow."""
        if size > self._copy:
            self._bodies.grow(size - self._copy, self._joined())
        elif size < self._copy:
            self._bodies.release(self._copy - size, self._joined())
        self._copy = size

    def release(self) -> None:
        if self._age is not None:
            self._bodies.leave(self._age)
            self._age = None
            self._body = self._copy = 0

    def _joined(self) -> int:
        if self._age is None:
            self._age = self._bodies.join()
        return self._age


def reserve_inflated(scope: Scope, size: int) -> None:
    """Count `size` bytes for the copy that this request's body inflates to. A later call replaces the size.

    Raises ApiProblem (503).
    """
    scope[_KEY].set_copy(size if size > UNCOUNTED else 0)


class BodyLimit:
    """ASGI middleware that raises ApiProblem from `receive`.

    413: the body is, or announces that it is, over `limit` bytes, or it is JSON of more than MOST_LISTS. 503: `bodies`
    has no room for the body, or the body arrives too slowly.
    """

    def __init__(self, app: ASGIApp, limit: int, bodies: Bodies, timeout: float) -> None:
        """`timeout`: seconds by which a body may fall behind `_SLOWEST`."""
        self._app = app
        self._limit = limit
        self._bodies = bodies
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        header = headers.get("content-length", "0")
        announced = int(header) if header.isdecimal() else self._limit + 1
        is_json = "json" in headers.get("content-type", "").lower()
        received = found = 0
        complete = False
        taken, seconds_left = 0.0, self._timeout
        reserved = scope[_KEY] = Reservation(self._bodies)
        now = asyncio.get_running_loop().time

        async def part() -> Message:
            nonlocal taken, seconds_left
            began = now()
            try:
                async with asyncio.timeout(seconds_left):
                    message = await receive()
            except TimeoutError as error:
                raise errors.body_stalled(taken + now() - began, received) from error
            waited = now() - began  # Not the time for which the API itself does not read.
            taken += waited
            seconds_left = min(self._timeout, seconds_left - waited + len(message.get("body", b"")) / _SLOWEST)
            return message

        async def bounded() -> Message:
            nonlocal received, found, complete
            if announced > self._limit:
                raise errors.too_large(self._limit)
            # A client that stalls would keep its connection, and the room of its body, from other requests.
            message = await (receive() if complete else part())
            if message["type"] == "http.request":
                complete = not message.get("more_body", False)
                received += len(message.get("body", b""))
                if received > self._limit:
                    raise errors.too_large(self._limit)
                if received > UNCOUNTED:
                    await reserved.admit(received)
                    found += lists(message.get("body", b"")) if is_json else 0
                    if found > MOST_LISTS:
                        raise errors.too_many_lists(MOST_LISTS)
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            reserved.release()
