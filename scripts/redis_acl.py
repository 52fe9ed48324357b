"""What Redis lets the trajectory API do: the content of the users.acl that `make secure` writes.

Three users. `default`, whom a client is that says nothing, is off. `api` has the commands below on the keys gm:* and
the channel gm:events, and no others: it cannot flush, configure, list keys, debug, or touch what is not ours. `health`
may ping, for the container's health check, which so needs no password.

Plain Python, without packages: it runs where only Docker is installed.
"""

from __future__ import annotations

import hashlib

USER = "api"
KEYS = "gm:*"
CHANNEL = "gm:events"

IN_SCRIPTS = """
    TIME PUBLISH EXISTS DEL UNLINK RENAME
    GET SET STRLEN PERSIST PEXPIRE INCRBY DECRBY
    HGET HSET HSETNX HMGET HGETALL HDEL HEXISTS HINCRBY HKEYS HVALS HLEN HRANDFIELD
    LLEN LPOP LPOS LPUSH LRANGE LREM RPOP RPUSH
    SADD SREM SCARD SISMEMBER SPOP
    ZADD ZINCRBY ZREM ZREVRANGE ZSCORE ZCARD ZCOUNT ZRANGE ZRANGEBYSCORE ZREMRANGEBYRANK ZREMRANGEBYSCORE ZPOPMIN
    ZREVRANGEBYSCORE XADD
"""
"""Commands of store/lua/*.lua. A test compares."""

BY_THE_STORE = """
    EVALSHA SCRIPT|LOAD MULTI EXEC PING TIME SUBSCRIBE UNSUBSCRIBE
    EXISTS GET SET MGET HGET HMGET HGETALL HKEYS LRANGE SMEMBERS ZRANGE ZRANGEBYSCORE ZSCORE XRANGE XREVRANGE
"""
"""Commands that the API sends itself."""

BY_THE_ARCHIVER = "SET GET DEL PEXPIRE LLEN LRANGE"
"""Its lock, which is redis-py's, and its queue."""

BY_METRICS = "INFO"
"""Memory in use and delayed fsyncs, for /metrics."""


def commands() -> list[str]:
    """All of them once, in alphabetical order."""
    return sorted({*IN_SCRIPTS.split(), *BY_THE_STORE.split(), *BY_THE_ARCHIVER.split(), *BY_METRICS.split()})


def users_acl(password: str) -> str:
    """The file's lines. It holds the password's SHA-256, not the password."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    allowed = " ".join(f"+{command.lower()}" for command in commands())
    return (
        "user default off resetpass resetkeys resetchannels -@all\n"
        f"user {USER} on #{digest} resetkeys ~{KEYS} resetchannels &{CHANNEL} -@all {allowed}\n"
        "user health on nopass resetkeys resetchannels -@all +ping\n"
    )
