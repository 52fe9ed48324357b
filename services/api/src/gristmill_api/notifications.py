"""Long polls without polling Redis: a request sleeps until Redis publishes that its answer may have changed.

Every script that may let a waiting request continue publishes a topic on one channel (store/keys.py). One task of this
process listens to the channel and wakes the requests that wait for the topic, whichever process made the change. A
re-check once per second finds changes that no script publishes (a permit or lease that expires), and notifications that
a broken connection lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ConnectionError, RedisError  # noqa: A004

from gristmill.internal.logs import line
from gristmill_api.metrics import Metrics
from gristmill_api.store import keys
from gristmill_api.store.connection import DURABLE, check_server, weak_durability

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

RECHECK_S: Final = 1.0
_RETRY_S = 0.5
_IDLE_S = 15.0
"""After a pause of this length the listener sends PING, and the answer may take as long. A firewall may drop an idle
connection silently, and then no notification would wake a request."""


class Notifications:
    """The requests that wait, by topic. Lives on one event loop."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._closed = False

    def publish(self, topic: str) -> None:
        """Wake the requests that wait for a topic such as "archive gm:{a}:". Requests that wait for "archive" of any
        run, or for the events of that run, wake too. A script publishes after its writes."""
        kind, _, prefix = topic.partition(" ")
        for name in {topic, kind, keys.events_topic_of(prefix)}:
            for event in self._waiting.get(name, ()):
                event.set()

    def publish_all(self) -> None:
        for topic in self._waiting:
            self.publish(topic)

    @property
    def closed(self) -> bool:
        """Whether the process is stopping, so that no request should wait any longer."""
        return self._closed

    def close(self) -> None:
        """End every wait now with the answer that there is, because the process is stopping."""
        self._closed = True
        self.publish_all()

    async def poll(
        self,
        topic: str,
        attempt: Callable[[], Awaitable[T | None]],
        wait: float,
        gone: Callable[[], Awaitable[bool]],
    ) -> T | None:
        """Repeat `attempt` at each notification of `topic` until it returns a result, for `wait` seconds at most.

        Stops early if `gone()`, because an attempt for a client that hung up could give it a batch or a permit.
        """
        deadline = time.monotonic() + wait
        with self.listening(topic) as changed:
            while True:
                # Cleared before the attempt, so that no notification in between is missed.
                changed.clear()
                result = await attempt()
                seconds_left = deadline - time.monotonic()
                if result is not None or seconds_left <= 0 or self._closed:
                    return result
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), min(seconds_left, RECHECK_S))
                if await gone():
                    return None

    @contextlib.contextmanager
    def listening(self, topic: str) -> Iterator[asyncio.Event]:
        """Yields an event that is set at every notification of the topic. The caller clears it."""
        event = asyncio.Event()
        self._waiting[topic].add(event)
        try:
            yield event
        finally:
            self._waiting[topic].discard(event)
            if not self._waiting[topic]:
                del self._waiting[topic]


async def listen_to_redis(redis: Redis, notifications: Notifications, metrics: Metrics) -> None:
    """Listen to Redis until the task is cancelled. Log once each when Redis goes away and when it returns.

    `redis` is a separate client, because a subscribed connection accepts no other command.
    """
    down = False
    while True:
        try:
            await _listen(redis, notifications, metrics, came_back=down)
        except (RedisError, OSError) as error:
            metrics.redis_up.set(0)
            if not down:
                _LOG.error(line("redis", state="down", error=error, remedy="answering 503 until it is back"))
            down = True
            await asyncio.sleep(_RETRY_S)


async def _listen(redis: Redis, notifications: Notifications, metrics: Metrics, *, came_back: bool) -> None:
    async with redis.pubsub(ignore_subscribe_messages=True) as subscription:
        await check_server(redis)
        await subscription.subscribe(keys.EVENTS)
        metrics.redis_up.set(1)
        if came_back:
            _LOG.info(line("redis", state="up"))
        await _warn_of_weak_durability(redis)
        notifications.publish_all()
        asked = False
        while True:
            message = await subscription.get_message(timeout=_IDLE_S)
            if message is not None:
                asked = False
                if message["type"] == "message":
                    notifications.publish(message["data"].decode())
            elif asked:
                raise ConnectionError(f"no answer to PING in {_IDLE_S:g} s")
            else:
                await subscription.ping()
                asked = True


async def _warn_of_weak_durability(redis: Redis) -> None:
    # None: the user of a locked-down Redis may not use CONFIG.
    for name, value in (await weak_durability(redis) or {}).items():
        _LOG.warning(
            "REDIS CAN LOSE ACKNOWLEDGED GROUPS when it is killed: %s is %r, not %r. "
            "Start redis-server with --appendonly yes --appendfsync always.",
            name,
            value,
            DURABLE[name],
        )
