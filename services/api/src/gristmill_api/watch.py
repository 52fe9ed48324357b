"""The task that listens to Redis: it wakes waiting requests and tells, once each, when Redis goes and comes back."""

from __future__ import annotations

import asyncio
import logging

from redis.asyncio import Redis
from redis.exceptions import ConnectionError, RedisError, ResponseError  # noqa: A004

from gristmill.logs import line
from gristmill_api.changes import Changes
from gristmill_api.metrics import Metrics
from gristmill_api.store import keys
from gristmill_api.store.connection import check_server
from gristmill_api.store.records import text

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.5
_IDLE_S = 15.0
"""After a pause of this length the listener sends PING, and the answer may take as long. A firewall may drop an idle
connection without a word to its ends, and requests would wait without being woken."""


async def watch(redis: Redis, changes: Changes, metrics: Metrics) -> None:
    """Listen for ever. `redis` is a client of its own: a subscribed connection takes no other command."""
    down = False
    while True:
        try:
            await _listen(redis, changes, metrics, came_back=down)
        except (RedisError, OSError) as error:
            metrics.redis_up.set(0)
            if not down:
                _LOG.error(line("redis", state="down", error=error, remedy="answering 503 until it is back"))
            down = True
            await asyncio.sleep(_RETRY_S)


async def _listen(redis: Redis, changes: Changes, metrics: Metrics, *, came_back: bool) -> None:
    async with redis.pubsub(ignore_subscribe_messages=True) as subscription:
        await check_server(redis)
        await subscription.subscribe(keys.EVENTS)
        metrics.redis_up.set(1)
        if came_back:
            _LOG.info(line("redis", state="up"))
        await _warn_of_weak_durability(redis)
        changes.tell_all()
        asked = False
        while True:
            message = await subscription.get_message(timeout=_IDLE_S)
            if message is not None:
                asked = False
                if message["type"] == "message":
                    changes.tell(message["data"].decode())
            elif asked:
                raise ConnectionError(f"no answer to PING in {_IDLE_S:g} s")
            else:
                await subscription.ping()
                asked = True


async def _warn_of_weak_durability(redis: Redis) -> None:
    try:
        found = await redis.config_get("append*")
    except ResponseError:
        return  # CONFIG is closed to us, as it should be for a locked-down user: then nothing is known.
    settings = {text(name): text(value) for name, value in found.items()}
    for name, wanted in (("appendonly", "yes"), ("appendfsync", "always")):
        if settings.get(name) != wanted:
            _LOG.warning(
                "REDIS CAN LOSE ACKNOWLEDGED GROUPS when it is killed: %s is %r, not %r. "
                "Start redis-server with --appendonly yes --appendfsync always.",
                name,
                settings.get(name),
                wanted,
            )
