"""Bounds the size of each request body, and the memory that all bodies take together.

Starlette has a middleware for the size of one body. It answers in plain text, and every error of this API is JSON.
Work on a large body happens on a thread, so that the event loop answers other requests meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar, TypeVarTuple, Unpack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill_api import errors

T = TypeVar("T")
Args = TypeVarTuple("Args")

UNCOUNTED: Final = 64 * 1024
"""Bytes. A body of this size is not counted in `Bodies`."""
IN_LOOP: Final = 512 * 1024
"""Bytes. On two cores of an EPYC, to check and hash a native group of this size takes 0.5 ms, to inflate that much gzip
1 ms, and to read that much of Atropos' JSON 2 ms. A thread adds 0.4 ms, three times the check of a group of 67 kB."""
_WAIT_S: Final = 10.0
"""Seconds that a request waits for room before it is refused. The client keeps the body meanwhile."""
_STALL_S: Final = 30.0
"""Longest pause between two parts of a large body."""
_KEY: Final = "gristmill.body"


async def offload(size: int, work: Callable[[Unpack[Args]], T], *args: *Args) -> T:
    """Returns `work(*args)`, run on a thread if `size`, the bytes to work on, is more than IN_LOOP."""
    if size <= IN_LOOP:
        return work(*args)
    return await asyncio.to_thread(work, *args)


class Bodies:
    """Counts the bytes of request bodies that are in memory, with their inflated copies. Lives on one event loop.

    Bodies up to 64 KiB (UNCOUNTED) are not counted. A body larger than the limit is admitted when no other is counted.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        return self._held

    async def admit(self, size: int) -> None:
        """Count `size` more bytes as soon as there is room, in the order of the calls. Raises ApiProblem (503)."""
        if not self._waiting and self._fits(size):
            self._held += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(_WAIT_S):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release(size)  # It was admitted in the same moment.
            else:
                self._waiting.remove((size, turn))
                self._admit_waiting()
            if isinstance(error, TimeoutError):
                raise errors.too_many_bodies(self._limit) from error
            raise

    def grow(self, size: int, own: int) -> None:
        """Count `size` more bytes of a request that has `own` bytes already. Raises ApiProblem (503) at once: a request
        that waited here would hold memory that other requests wait for."""
        if self._held + size > self._limit and self._held > own:
            raise errors.too_many_bodies(self._limit)
        self._held += size

    def release(self, size: int) -> None:
        self._held -= size
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            self._held += size
            turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return self._held == 0 or self._held + size <= self._limit


class Reservation:
    """The bytes that one request has counted in `Bodies`: its body, and the copy that the body inflates to."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._body = 0
        self._copy = 0

    async def admit(self, size: int) -> None:
        """Count a body of `size` bytes, as Bodies.admit."""
        await self._bodies.admit(size)
        self._body += size

    def grow_body(self, size: int) -> None:
        """Count a body of at least `size` bytes, as Bodies.grow."""
        if size > self._body:
            self._bodies.grow(size - self._body, self._body + self._copy)
            self._body = size

    def set_copy(self, size: int) -> None:
        """Count a copy of `size` bytes in place of the previous copy, as Bodies.grow."""
        if size > self._copy:
            self._bodies.grow(size - self._copy, self._body + self._copy)
        elif size < self._copy:
            self._bodies.release(self._copy - size)
        self._copy = size

    def release(self) -> None:
        if self._body or self._copy:
            self._bodies.release(self._body + self._copy)
            self._body = self._copy = 0


def reserve_inflated(scope: Scope, size: int) -> None:
    """Count `size` bytes for the copy that this request's body inflates to. A later call replaces the size.

    Raises ApiProblem (503).
    """
    scope[_KEY].set_copy(size if size > UNCOUNTED else 0)


class BodyLimit:
    """ASGI middleware that raises ApiProblem from `receive`.

    413: the body is, or announces that it is, over `limit` bytes. 503: `bodies` has no room for the body, or the rest
    of a large body does not arrive.
    """

    def __init__(self, app: ASGIApp, limit: int, bodies: Bodies) -> None:
        self._app = app
        self._limit = limit
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = Headers(scope=scope).get("content-length", "0")
        announced = int(header) if header.isdecimal() else self._limit + 1
        received = 0
        complete = False
        large = announced > UNCOUNTED
        admitted = not large or announced > self._limit
        reserved = scope[_KEY] = Reservation(self._bodies)

        async def bounded() -> Message:
            nonlocal received, complete, large, admitted
            if not admitted:
                await reserved.admit(announced)
                admitted = True
            # A client that stalls would keep the room of its body from other requests.
            message = await (_next_part(receive) if large and not complete else receive())
            if message["type"] == "http.request":
                complete = not message.get("more_body", False)
                received += len(message.get("body", b""))
                if max(announced, received) > self._limit:
                    raise errors.too_large(self._limit)
                if received > max(UNCOUNTED, announced):
                    large = True
                    reserved.grow_body(received)  # Its length was not announced.
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            reserved.release()


async def _next_part(receive: Receive) -> Message:
    try:
        async with asyncio.timeout(_STALL_S):
            return await receive()
    except TimeoutError as error:
        raise errors.body_stalled(_STALL_S) from error
