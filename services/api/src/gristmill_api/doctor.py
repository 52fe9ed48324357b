"""Checks for `gristmill doctor`: whether Redis keeps every group that the API has acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from redis.exceptions import RedisError

from gristmill import ConfigError
from gristmill.internal.check import Check
from gristmill_api.redis_url import uses_tls
from gristmill_api.settings import Settings
from gristmill_api.store.connection import check_server, connect, weak_durability
from gristmill_api.store.records import text

_ASK_AN_ADMIN = "ask its administrator for `CONFIG GET append*`: appendonly must be yes, and appendfsync always"


def before_run(config: str, environ: Mapping[str, str]) -> list[Check]:
    """Returns the checks of the Redis at REDIS_URL. `config`: not needed, because all runs use the same Redis."""
    try:
        settings = Settings.read(environ)
    except ConfigError as error:
        return [Check("redis", "failed", error.report())]
    return asyncio.run(check_redis(settings))


async def check_redis(settings: Settings) -> list[Check]:
    """Checks version, durability and eviction of a Redis over TCP, TLS or a Unix socket."""
    where = f"Redis at {settings.redis_address}" + (" over TLS" if uses_tls(settings.redis_url) else "")
    async with connect(settings.redis_url, settings.redis_login) as redis:
        try:
            await check_server(redis)
            weak = await weak_durability(redis)
            memory = {} if weak is None else await redis.config_get("maxmemory-policy")
        except ConfigError as error:
            return [Check("redis", "failed", error.report())]
        except (RedisError, OSError) as error:
            why = f"{where} does not answer ({type(error).__name__}); start the stack, or set REDIS_URL"
            return [Check("redis", "warning", f"not checked: {why}")]
    if weak is None:
        return [Check("redis", "warning", f"{where} does not let this user read its settings; {_ASK_AN_ADMIN}")]
    if weak:
        values = ", ".join(f"{name} is {value!r}" for name, value in weak.items())
        return [
            Check(
                "redis",
                "failed",
                f"{where} can lose groups that were acknowledged: {values}. "
                "Start redis-server with --appendonly yes --appendfsync always",
            )
        ]
    policy = next((text(value) for value in memory.values()), "noeviction")
    if policy != "noeviction":
        return [
            Check(
                "redis",
                "failed",
                f"{where} deletes keys when its memory is full: maxmemory-policy is {policy!r}. "
                "Start redis-server with --maxmemory-policy noeviction",
            )
        ]
    return [Check("redis", "ok", f"{where} writes each group to disk before it answers, and never evicts one")]
