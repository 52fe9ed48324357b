"""A batch that is being sent to the trainer: leased in Redis, acked once all of it was sent, nacked if the client left.

A task extends the lease while the batch is sent. After a crash of this process, the lease expires and the groups are
ready again in their places. The training step counts acks, so a request for the step waits for the acks of batches that
were sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence

from redis.exceptions import RedisError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gristmill.internal.logs import line
from gristmill_api.atropos.backpressure import Backpressure
from gristmill_api.atropos.queue import DELIVERY_TTL_S, Queue
from gristmill_api.errors import ApiProblem
from gristmill_api.http import framing
from gristmill_api.http.content_coding import GzipStream
from gristmill_api.store import LeasedGroup

_LOG = logging.getLogger(__name__)
_SETTLE_S = 5.0
_JSON_GROWTH = 4
"""Bytes of a group's JSON per byte of the stored group, about."""


def parts(groups: Sequence[LeasedGroup]) -> list[list[LeasedGroup]]:
    """Returns a batch in order, in parts that are read and sent one after the other."""
    return framing.parts(groups, lambda group: _JSON_GROWTH * group.size)


class Deliveries:
    """The batches that this process is sending."""

    def __init__(self, queue: Queue, backpressure: Backpressure) -> None:
        self.queue = queue
        self._backpressure = backpressure
        self._settling: set[asyncio.Task[None]] = set()

    def settle(self, batch_id: str, groups: Sequence[LeasedGroup], whole: bool) -> asyncio.Task[None]:
        """Ack or nack a batch in a task that outlives the request. A server that shuts down cancels requests."""
        task = asyncio.create_task(self._settle(batch_id, groups, whole))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task

    async def settled(self) -> None:
        """Wait until every batch that was sent is acked."""
        if self._settling:
            await asyncio.wait(self._settling, timeout=_SETTLE_S)

    async def _settle(self, batch_id: str, groups: Sequence[LeasedGroup], whole: bool) -> None:
        size = sum(group.size for group in groups)
        facts = {"run": self.queue.run_id, "batch": batch_id, "groups": len(groups), "bytes": size}
        try:
            if not whole:
                await self._backpressure.retry(lambda: self.queue.nack(batch_id), _never)
                _LOG.warning(line("vanished", **facts))
            elif await self._backpressure.retry(lambda: self.queue.ack(batch_id), _never):
                _LOG.info(line("batch", **facts))
            else:
                _LOG.warning(line("late", **facts, why="its lease ran out while it was sent; its groups go out again"))
        except (ApiProblem, RedisError) as error:
            _LOG.warning(line("unsettled", **facts, why=error, then="its lease runs out, its groups go out again"))


async def _never() -> bool:
    return False


class Delivery(Response):
    """The response {"batch": [...]}, with at most two parts in memory."""

    def __init__(
        self,
        deliveries: Deliveries,
        batch_id: str,
        groups: Sequence[LeasedGroup],
        first: Sequence[bytes],
        others: Sequence[Sequence[LeasedGroup]],
        gzip: bool,
    ) -> None:
        """`first`: the JSON of the first part. It is read before the response starts, so Redis is not away. `others`:
        the groups of the other parts."""
        self._deliveries = deliveries
        self._queue = deliveries.queue
        self._batch_id = batch_id
        self._groups = groups
        self._first = first
        self._others = others
        self._gzip = gzip
        headers = {"Vary": "Accept-Encoding", **({"Content-Encoding": "gzip"} if gzip else {})}
        super().__init__(None, 200, headers, "application/json")
        del self.headers["content-length"]  # Not known: the connection's framing marks the end.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hung_up = asyncio.create_task(_hung_up(receive))
        lease = asyncio.create_task(self._keep())
        whole = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    if hung_up.done():
                        return
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            # The server accepts this message only when nearly all of the body has been sent.
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            # Read before the event loop continues. Later, the end of the response looks like a client that hung up.
            whole = not hung_up.done()
        finally:
            # Started before the event loop continues, because the client may ask for the step at once.
            settling = self._deliveries.settle(self._batch_id, self._groups, whole)
            for task in (hung_up, lease):
                task.cancel()
            await asyncio.gather(hung_up, lease, return_exceptions=True)
            await asyncio.shield(settling)

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        stream = GzipStream() if self._gzip else None
        async with contextlib.aclosing(self._texts()) as texts:
            async for text in texts:
                piece = text if stream is None else await stream.add(text)
                if piece:
                    yield piece
        if stream is not None:
            yield stream.end()

    async def _texts(self) -> AsyncGenerator[bytes, None]:
        """The answer's JSON. The next part is read from Redis while one is sent."""
        others = list(self._others)
        texts, before = self._first, b'{"batch":['
        while texts:
            reading = asyncio.create_task(self._queue.texts(self._batch_id, others.pop(0) if others else ()))
            try:
                yield before + b",".join(texts)
                before, texts = b",", await reading
            finally:
                reading.cancel()
        yield b"]}"

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(DELIVERY_TTL_S / 3)
            # The next turn tries again. A run that was deleted meanwhile needs no lease.
            with contextlib.suppress(RedisError, ApiProblem):
                await self._queue.extend(self._batch_id)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
