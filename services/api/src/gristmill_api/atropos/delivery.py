"""A batch on its way to the trainer: leased in Redis, acked once sent whole, given back when the client vanished.

While it is sent, a task keeps the lease alive; should this process die, the lease runs out and the groups are ready
again in their places. The step that a batch is for counts from its ack, so who asks for the step waits for the acks of
what was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence

from redis.exceptions import RedisError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gristmill.logs import line
from gristmill_api.atropos.deflate import Deflater
from gristmill_api.atropos.patience import Patience
from gristmill_api.atropos.queue import DELIVERY_TTL_S, Lent, Queue
from gristmill_api.atropos.translate import as_json
from gristmill_api.errors import Refused

_LOG = logging.getLogger(__name__)
_SETTLE_S = 5.0
_PART_BYTES = 2 * 1024 * 1024
"""Small groups are read and sent together."""


class Deliveries:
    """The batches that this process sends."""

    def __init__(self, queue: Queue, patience: Patience) -> None:
        self.queue = queue
        self._patience = patience
        self._settling: set[asyncio.Task[None]] = set()

    def settle(self, batch_id: str, lent: Sequence[Lent], whole: bool) -> asyncio.Task[None]:
        """Tell Redis how it ended, in a task that outlives the request: a server that shuts down cancels those."""
        task = asyncio.create_task(self._settle(batch_id, lent, whole))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task

    async def settled(self) -> None:
        """What was sent whole counts now."""
        if self._settling:
            await asyncio.wait(self._settling, timeout=_SETTLE_S)

    async def _settle(self, batch_id: str, lent: Sequence[Lent], whole: bool) -> None:
        size = sum(group.size for group in lent)
        facts = {"run": self.queue.run_id, "batch": batch_id, "groups": len(lent), "bytes": size}
        try:
            if not whole:
                await self._patience.insist(lambda: self.queue.give_back(batch_id), _never)
                _LOG.warning(line("vanished", **facts))
            elif await self._patience.insist(lambda: self.queue.ack(batch_id), _never):
                _LOG.info(line("batch", **facts))
            else:
                _LOG.warning(line("late", **facts, why="its lease ran out while it was sent; its groups go out again"))
        except (Refused, RedisError) as error:
            _LOG.warning(line("unsettled", **facts, why=error, then="its lease runs out, its groups go out again"))


async def _never() -> bool:
    return False


class Delivery(Response):
    """The answer {"batch": [...]}, two parts in memory at a time."""

    def __init__(
        self, deliveries: Deliveries, batch_id: str, lent: Sequence[Lent], first: Sequence[bytes], gzip: bool
    ) -> None:
        """`first`: the bodies of the first part, read before the answer starts: a Redis gone by then is a clean 503."""
        self._deliveries = deliveries
        self._queue = deliveries.queue
        self._batch_id = batch_id
        self._lent = lent
        self._first = first
        self._gzip = gzip
        headers = {"Vary": "Accept-Encoding", **({"Content-Encoding": "gzip"} if gzip else {})}
        super().__init__(None, 200, headers, "application/json")
        del self.headers["content-length"]  # not known: the connection's framing tells a client where it ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_hung_up(receive))
        lease = asyncio.create_task(self._keep())
        whole = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    if gone.done():
                        return
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            # The server takes this one only when what was sent before has all but left.
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            # Asked before the event loop turns again: then the end of the answer looks like a client that hung up.
            whole = not gone.done()
        finally:
            # Begun before the event loop turns again: the client may ask for the step at once.
            settling = self._deliveries.settle(self._batch_id, self._lent, whole)
            for task in (gone, lease):
                task.cancel()
            await asyncio.gather(gone, lease, return_exceptions=True)
            await asyncio.shield(settling)

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        deflater = Deflater() if self._gzip else None
        async with contextlib.aclosing(self._texts()) as texts:
            async for text in texts:
                piece = text if deflater is None else await deflater.add(text)
                if piece:
                    yield piece
        if deflater is not None:
            yield deflater.end()

    async def _texts(self) -> AsyncGenerator[bytes, None]:
        """The answer's JSON. The next part is read from Redis while one is sent."""
        _, *others = parts(self._lent)
        bodies, before = self._first, b'{"batch":['
        while bodies:
            reading = asyncio.create_task(self._queue.payloads(self._batch_id, others.pop(0) if others else ()))
            try:
                yield before + b",".join([await as_json(body) for body in bodies])
                before, bodies = b",", await reading
            finally:
                reading.cancel()
        yield b"]}"

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(DELIVERY_TTL_S / 3)
            with contextlib.suppress(RedisError):  # the next turn tries again
                await self._queue.extend(self._batch_id)


def parts(lent: Sequence[Lent]) -> list[list[Lent]]:
    """The batch in order, cut so that each part has at most _PART_BYTES or is one group."""
    cut: list[list[Lent]] = []
    room = 0
    for group in lent:
        if not cut or group.size > room:
            cut.append([])
            room = _PART_BYTES
        cut[-1].append(group)
        room -= group.size
    return cut


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
