"""The trajectory API's permissions in Redis: the content of the users.acl that `make secure` writes.

The file has three users. `default`, the user of clients that do not log in, is off and has no password, so no client
can become this user. `default` keeps the rights to write, because Redis replays its append-only file as this user and
checks the rights at each EXEC of the file. Without the rights, a restart of Redis would lose every write of a script.
`api` may only run the commands below, on the keys gm:* and the channel gm:events. It cannot flush, configure, list
keys, debug, or access other keys. `health` may ping, so the container's health check needs no password.

This module needs no packages, because it also runs on machines that have only Docker.
"""

from __future__ import annotations

import hashlib

USER = "api"
KEYS = "gm:*"
CHANNEL = "gm:events"

IN_SCRIPTS = """
    TIME PUBLISH EXISTS DEL UNLINK RENAME
    GET SET SETRANGE SETBIT BITPOS STRLEN PERSIST PEXPIRE INCRBY DECRBY
    HGET HSET HSETNX HMGET HGETALL HDEL HEXISTS HINCRBY HKEYS HVALS HLEN HRANDFIELD
    LLEN LPOP LPOS LPUSH LRANGE LREM RPOP RPUSH
    SADD SREM SCARD SISMEMBER SPOP
    ZADD ZINCRBY ZREM ZREVRANGE ZSCORE ZCARD ZCOUNT ZRANGE ZRANGEBYSCORE ZREMRANGEBYRANK ZREMRANGEBYSCORE ZPOPMIN
    ZREVRANGEBYSCORE XADD
"""
"""Commands of store/lua/*.lua. A test compares the two."""

BY_THE_STORE = """
    EVALSHA SCRIPT|LOAD MULTI EXEC PING TIME WAIT SUBSCRIBE UNSUBSCRIBE
    EXISTS GET SET MGET HGET HMGET HGETALL HEXISTS HKEYS LRANGE SMEMBERS
    ZCARD ZRANGE ZRANGEBYSCORE ZSCORE XRANGE XREVRANGE
"""
"""Commands that the API sends itself."""

BY_THE_ARCHIVER = "SET GET DEL PEXPIRE LLEN LRANGE LPOP"
"""Commands for the archiver's lock, which is redis-py's, and for its queues."""

BY_METRICS = "INFO"
"""Command for memory in use and delayed fsyncs in /metrics."""


REPLAY = "~* -@all +@write +multi +exec +select"
"""Rights that the replay of the append-only file needs. The file may hold writes from before `make secure`, when each
client had all rights, and writes to keys of other programs. A transaction may begin with a SELECT of its database."""


def commands() -> list[str]:
    """Returns each command once, in alphabetical order."""
    return sorted({*IN_SCRIPTS.split(), *BY_THE_STORE.split(), *BY_THE_ARCHIVER.split(), *BY_METRICS.split()})


def users_acl(password: str) -> str:
    """Returns the text of users.acl. The file holds the password's SHA-256, not the password."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    allowed = " ".join(f"+{command.lower()}" for command in commands())
    return (
        f"user default off resetpass resetkeys resetchannels {REPLAY}\n"
        f"user {USER} on #{digest} resetkeys ~{KEYS} resetchannels &{CHANNEL} -@all {allowed}\n"
        "user health on nopass resetkeys resetchannels -@all +ping\n"
    )
