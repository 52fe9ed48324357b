"""A TCP proxy on loopback that causes network faults in connections, as long as a fault is set.

The proxy is in front of a server; "request" is the way to the server, "answer" the way back. A fault applies to all
connections, open ones too, until another fault is set or `heal` is called. The proxy knows neither HTTP nor Redis: it
counts bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeVar

from tests.support.ports import free_port

T = TypeVar("T")
Direction = Literal["request", "answer"]


@dataclass(frozen=True)
class Way:
    """The fault in one direction. The default: none."""

    delay_s: float = 0.0
    """The delay of each piece, in seconds."""
    slice: int | None = None
    """Bytes that are passed on at a time."""
    reset_after: int | None = None
    """The number of bytes of a connection since the fault was set, after which both ends get a RST. 0 means when the
    first byte arrives, so that a whole answer is lost."""
    swallow: bool = False
    """Whether bytes are read and never forwarded."""
    hold: bool = False
    """Whether bytes are kept until the fault is over and then forwarded, also if the sender hung up long ago."""


@dataclass(frozen=True)
class Fault:
    request: Way = field(default_factory=Way)
    answer: Way = field(default_factory=Way)
    refuse: bool = False
    """Whether the proxy does not listen: connecting fails, and open connections get a RST."""
    times: int | None = None
    """The number of resets after which the fault ends."""


HEALTHY = Fault()


class FaultProxy:
    """A proxy in front of 127.0.0.1:`target`, on a separate port and event loop."""

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self._target = target
        self._fault = HEALTHY
        self._changed = asyncio.Event()
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._resets = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    @property
    def resets(self) -> int:
        """Returns how many connections `reset_after` has reset since the fault was set."""
        return self._resets

    def set(self, fault: Fault) -> None:
        """Sets the fault, which replaces the previous fault. Counting restarts."""
        self._run(self._set(fault))

    def heal(self) -> None:
        self.set(HEALTHY)

    @contextlib.contextmanager
    def under(self, fault: Fault) -> Iterator[None]:
        self.set(fault)
        try:
            yield
        finally:
            self.heal()

    def passed(self, direction: Direction) -> int:
        """Returns the number of bytes forwarded since the fault was set, by the connection that forwarded most."""
        return max((link.passed[direction] for link in list(self._links)), default=0)

    async def _set(self, fault: Fault) -> None:
        self._fault, self._resets = fault, 0
        for link in list(self._links):
            link.passed = {"request": 0, "answer": 0}
            # The swallowed bytes are missing in the stream, so such a connection can never be used again.
            if fault.refuse or link.swallowed:
                link.reset()
        if fault.refuse:
            await self._stop_listening()
        else:
            await self._listen()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(writer)
        self._links.add(link)
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
            link.writers.append(to_server)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(link, "request", reader, to_server))
                pumps.create_task(self._pump(link, "answer", from_server, writer))
        except* OSError:
            link.reset()  # One end is closed, or no server listens: the other end is closed too.
        finally:
            self._links.discard(link)
            for end in link.writers:
                end.close()

    async def _pump(
        self, link: _Link, direction: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        sink.transport.set_write_buffer_limits(0)  # so that drain() returns when the kernel has all the bytes
        while data := await source.read(1 << 16):
            while data:
                data = data[await self._pass_on(link, direction, data, sink) :]
        sink.write_eof()

    async def _pass_on(self, link: _Link, direction: Direction, data: bytes, sink: asyncio.StreamWriter) -> int:
        """Handles the first bytes of `data` as the current fault requires. Returns how many bytes it handled."""
        fault = self._fault
        way = fault.request if direction == "request" else fault.answer
        if way.hold:
            await self._changed.wait()
            return 0
        if way.swallow:
            link.swallowed = True
            return len(data)
        if way.delay_s:
            await asyncio.sleep(way.delay_s)
        size = min(way.slice or len(data), len(data))
        if way.reset_after is not None:
            size = min(size, max(way.reset_after - link.passed[direction], 0))
        if size:
            link.passed[direction] += size
            sink.write(data[:size])
            await sink.drain()
        if way.reset_after is not None and fault is self._fault and link.passed[direction] >= way.reset_after:
            self._count_reset(fault)
            link.reset()
            raise ConnectionResetError("as the fault requires")
        await asyncio.sleep(0)
        return size

    def _count_reset(self, fault: Fault) -> None:
        self._resets += 1
        if self._resets == fault.times:
            self._fault = HEALTHY

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _close(self) -> None:
        await self._set(Fault(refuse=True))
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        if serving:
            await asyncio.wait(serving)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Link:
    """A client's connection to the proxy and the proxy's connection to the server."""

    def __init__(self, to_client: asyncio.StreamWriter) -> None:
        self.writers = [to_client]
        self.passed: dict[Direction, int] = {"request": 0, "answer": 0}
        self.swallowed = False

    def reset(self) -> None:
        """Sends a RST to both ends: with SO_LINGER of 0 s, close() discards the bytes that are on the way."""
        for writer in self.writers:
            end: socket.socket | None = writer.get_extra_info("socket")
            if end is not None and end.fileno() >= 0:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
