"""An event listener: records which waiters a change wakes and which events it writes to the stream."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from redis.asyncio import Redis

from gristmill_api.store import keys

Recorded = tuple[set[str], list[dict[str, str]]]
NOTHING: Recorded = (set(), [])


class EventListener:
    """Listens to one run."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self._prefix = keys.prefix(run_id)
        self._stream = self._prefix + "events"
        self._topic = keys.events_topic(run_id)
        self._subscription = redis.pubsub(ignore_subscribe_messages=True)
        self._last = "0-0"

    async def open(self) -> None:
        await self._subscription.subscribe(keys.EVENTS)
        await self._subscription.get_message(timeout=5)
        newest: Any = await self._redis.xrevrange(self._stream, count=1)
        self._last = newest[0][0].decode() if newest else "0-0"

    async def close(self) -> None:
        await self._subscription.aclose()  # type: ignore[no-untyped-call]

    async def recorded(self, call: Awaitable[Any] | None = None) -> Recorded:
        """Returns the messages that were published while `call` ran, and the run's events that were written to the
        stream."""
        if call is not None:
            await call
        # Redis sends in order: when the marker has arrived, every message published before it has arrived.
        await self._redis.publish(keys.EVENTS, "marker")
        topics: set[str] = set()
        while (message := await self._subscription.get_message(timeout=5)) is not None:
            topic = message["data"].decode()
            if topic == "marker":
                break
            topics.add(topic)
        found: Any = await self._redis.xrange(self._stream, f"({self._last}", "+")
        if found:
            self._last = found[-1][0].decode()
        events = [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in found]
        # Every notification of a run wakes the readers of its stream; `events` is published when no other name applies.
        own = {topic for topic in topics if topic.endswith(f" {self._prefix}")}
        assert own or not events, "a write to the stream wakes its reader"
        assert events or self._topic not in topics, "and not when nothing was"
        return topics - {self._topic}, events
