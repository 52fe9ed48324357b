"""Connections to Redis with the settings of this service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, ResponseError  # noqa: A004
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.maint_notifications import MaintNotificationsConfig

from gristmill import ConfigError
from gristmill_api.redis_url import WAIT_REPLICAS, redis_options
from gristmill_api.store.records import text
from gristmill_api.store.sentinel import following

Command = Sequence[str | bytes | int]

_DEFAULTS = {"max_connections": 64, "timeout": 5, "socket_timeout": 5, "socket_connect_timeout": 2}
"""Seconds. A URL may say otherwise: redis://host/0?socket_timeout=1."""
DURABLE: Final = {"appendonly": "yes", "appendfsync": "always"}
"""Settings with which a write that Redis acknowledged is on disk."""
_OLDEST: Final = 7
"""The first version of Redis whose scripts declare flags (`#!lua flags=allow-oom`)."""


def connect(url: str, login: Mapping[str, str]) -> Redis:
    """Returns a client that never repeats a command. `login`: username and password, if any.

    A script may have run although its answer was lost. Only the caller knows which calls are safe to repeat.
    """
    options: dict[str, Any] = {**_DEFAULTS, **redis_options(url), **login}
    # Maintenance notifications are for hosted clusters. With them, a closed connection shows only in a failing command.
    options["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)
    base: type[Connection] = options.pop("connection_class", Connection)
    if "sentinels" in options:
        base = following(base)
    replicas: int = options.pop(WAIT_REPLICAS, 0)
    kind = type(base.__name__, (_Connection, base), {})
    client = _Client.from_pool(BlockingConnectionPool(connection_class=kind, retry=Retry(NoBackoff(), 0), **options))
    assert isinstance(client, _Client)
    client.replicas = replicas
    return client


def wait_replicas(redis: Redis) -> int:
    """Returns the number of replicas that must have received a write before it counts, for a client of `connect`."""
    return redis.replicas if isinstance(redis, _Client) else 0


async def check_server(redis: Redis) -> None:
    """Raises ConfigError if the scripts cannot run on the server: it is older than they need, or a Redis Cluster.
    Raises RedisError if it does not answer."""
    settings: dict[bytes, Any] = {}
    # HELLO, unlike INFO, is allowed to every user. It came with Redis 6.
    with contextlib.suppress(ResponseError):
        reply = await redis.execute_command("HELLO")  # type: ignore[no-untyped-call]
        # RESP3 has maps; a server without RESP3 answers with a list.
        settings = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    server, version = settings.get(b"server", b"Redis").decode(), settings.get(b"version", b"5 or older").decode()
    if not settings or int(version.partition(".")[0]) < _OLDEST:
        problem = f"is {server} {version}; the API needs Redis {_OLDEST}.0 or newer."
    elif settings.get(b"mode") == b"cluster":
        problem = "is a Redis Cluster, whose scripts cannot use keys of several runs. Use a single server."
    else:
        return
    options = redis.connection_pool.connection_kwargs
    where = options.get("path") or options.get("service") or f"{options.get('host')}:{options.get('port')}"
    raise ConfigError("redis_unsuitable", f"The Redis at {where} {problem}")


async def weak_durability(redis: Redis) -> dict[str, str] | None:
    """Returns the settings with which Redis can lose acknowledged groups, and their values; {} if it cannot.

    None if the user of this connection may not read the settings. Raises RedisError if Redis does not answer.
    """
    try:
        found = await redis.config_get("append*")
    except ResponseError:
        return None
    settings = {text(name): text(value) for name, value in found.items()}
    return {name: settings.get(name, "") for name, value in DURABLE.items() if settings.get(name) != value}


async def ask(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    """The reply to each command, sent together; a ResponseError in the place of one that Redis refused.

    Raises redis.ConnectionError or redis.TimeoutError when an answer is lost: then any may have run.
    """
    limit, connection.socket_timeout = connection.socket_timeout, None
    try:
        async with asyncio.timeout(limit):
            await connection.send_packed_command(connection.pack_commands(commands))
            return [await _reply(connection) for _ in commands]
    except BaseException as error:
        await connection.disconnect(nowait=True)  # No other call may read an answer of this one.
        if isinstance(error, TimeoutError):
            raise RedisTimeoutError(f"no answer in {limit} s") from error
        raise
    finally:
        connection.socket_timeout = limit


async def _reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


class _Connection(AbstractConnection):
    """Raises ConnectionError if uvloop raises RuntimeError, and keeps a cancellation that comes while it sends."""

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """Write a command. Raises redis.ConnectionError and redis.TimeoutError."""
        # The library's own time limit is asyncio.wait_for, which loses a cancellation before Python 3.12.
        limit, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(limit):
                await super().send_packed_command(command, check_health)
        except TimeoutError as error:
            raise RedisTimeoutError("Timeout writing to socket") from error
        except RuntimeError as error:
            # uvloop's word for a write to a connection that was reset meanwhile. asyncio's own loop raises nothing
            # there and the read fails; redis-py knows the latter only.
            raise ConnectionError(f"the connection was closed: {error}.") from error
        finally:
            self.socket_timeout = limit


class _Client(Redis):
    replicas = 0
    """Of `wait_replicas`."""
