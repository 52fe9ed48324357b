"""Connections to Redis, as this service wants them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError  # noqa: A004

_DEFAULTS = {"max_connections": 64, "timeout": 5, "socket_timeout": 5, "socket_connect_timeout": 2}
"""Seconds. A URL may say otherwise: redis://host/0?socket_timeout=1."""


def connect(url: str, login: Mapping[str, str]) -> Redis:
    """A client that never repeats a command by itself: a script may have run although its answer was lost, so it is
    the caller, who knows what is safe to repeat, that tries again. `login`: username and password, if any."""
    options: dict[str, Any] = {**_DEFAULTS, **parse_url(url), **login}
    base: type[AbstractConnection] = options.pop("connection_class", Connection)
    kind = type(base.__name__, (_ClosedIsAway, base), {})
    return Redis.from_pool(BlockingConnectionPool(connection_class=kind, retry=Retry(NoBackoff(), 0), **options))


class _ClosedIsAway(AbstractConnection):
    """Makes uvloop's RuntimeError what it is. A write to a connection that was reset meanwhile raises it there, where
    asyncio's own loop raises nothing and the read fails; redis-py knows the latter only."""

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        try:
            await super().send_packed_command(command, check_health)
        except RuntimeError as error:
            raise ConnectionError(f"the connection was closed: {error}.") from error
