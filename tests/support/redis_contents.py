"""The whole contents of a Redis: to compare before and after, and to restore."""

from __future__ import annotations

import time
from typing import Any

import redis
from redis.asyncio import Redis as AsyncRedis

from gristmill_api.store import keys


def contents(client: redis.Redis) -> dict[str, Any]:
    """Returns every key with its value, and its time to live if it has one. Equal contents are equal dicts.

    The archiver's lock is left out, because every API takes and releases it at any time.
    """
    names = sorted(name for name in client.scan_iter(count=1000) if name != keys.ARCHIVER.encode())
    pipe = client.pipeline(transaction=True)
    for name in names:
        pipe.type(name)
        pipe.pexpiretime(name)
    replies = pipe.execute()
    pipe = client.pipeline(transaction=True)
    for name, kind in zip(names, replies[::2], strict=True):
        _READ[kind](pipe, name)
    values = pipe.execute()
    return {
        name.decode(): value if expires == -1 else (value, expires)
        for name, value, expires in zip(names, values, replies[1::2], strict=True)
    }


def wait_for_archiver(client: redis.Redis) -> None:
    """Waits until the archiver has taken the fates of all groups, so that the contents change by requests only."""
    deadline = time.monotonic() + 20
    while left := list(client.scan_iter(match=keys.fates("*"), count=1000)):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


_READ = {
    b"string": lambda pipe, name: pipe.get(name),
    b"hash": lambda pipe, name: pipe.hgetall(name),
    b"list": lambda pipe, name: pipe.lrange(name, 0, -1),
    b"set": lambda pipe, name: pipe.smembers(name),
    b"zset": lambda pipe, name: pipe.zrange(name, 0, -1, withscores=True),
    b"stream": lambda pipe, name: pipe.xrange(name),
}


async def key_names(client: AsyncRedis) -> set[str]:
    """Returns every key except the archiver's lock."""
    return {name.decode() async for name in client.scan_iter(count=1000)} - {keys.ARCHIVER}


class Snapshot:
    """A saved copy of a Redis' contents, which can be restored any number of times."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        names = list(client.scan_iter(count=1000))
        # Without an expiry, -1 becomes 0, which means no expiry to RESTORE.
        dumps = [(name, max(client.pexpiretime(name), 0), client.dump(name)) for name in names]
        # The archiver's lock may be gone by now.
        self._dumps = [(name, expiry_ms, bytes(dump)) for name, expiry_ms, dump in dumps if dump is not None]

    def put_back(self) -> None:
        """Restores the saved contents, and removes everything else."""
        pipe = self.client.pipeline(transaction=True)
        pipe.flushall()
        for name, expiry_ms, dump in self._dumps:
            pipe.restore(name, expiry_ms, dump, absttl=True)
        pipe.execute()
