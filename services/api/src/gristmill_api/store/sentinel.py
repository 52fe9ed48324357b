"""Connections to the master that Redis Sentinels name. After a fail-over, new connections go to the new master."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import ConnectionError, ReadOnlyError  # noqa: A004

_OF_SENTINELS = ("socket_timeout", "socket_connect_timeout", "ssl_")
"""Options, by their first letters, that connections to the Sentinels share with connections to the master."""


def following(base: type[Connection]) -> type[Connection]:
    """Returns a subclass of `base` that asks the Sentinels for the master whenever it connects.

    It takes the arguments `sentinels`, (host, port) of each, and `service`, instead of host and port.
    """
    return type(f"Sentinel{base.__name__}", (_Following, base), {})


class _Following(AbstractConnection):
    host: str
    port: int

    def __init__(self, *, sentinels: Sequence[tuple[str, int]], service: str, **options: Any) -> None:
        super().__init__(**options)
        shared = {name: value for name, value in options.items() if name.startswith(_OF_SENTINELS)}
        shared["ssl"] = isinstance(self, SSLConnection)
        self._sentinels = [(host, port, shared) for host, port in sentinels]
        self._service = service

    async def connect(self) -> None:
        """Connect to the master. Raises redis.ConnectionError if no Sentinel names one, or it does not answer."""
        if not self.is_connected:
            self.host, self.port = await self._master()
        await super().connect()  # type: ignore[no-untyped-call]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Returns an answer. Raises redis.ConnectionError also if the server became a replica: then the next command
        needs a connection to the new master."""
        try:
            return await super().read_response(*args, **options)
        except ReadOnlyError as error:
            await self.disconnect(nowait=True)
            raise ConnectionError(f"{self.host}:{self.port} is not the master any longer") from error

    async def _master(self) -> tuple[str, int]:
        finder = Sentinel([])  # type: ignore[no-untyped-call]
        finder.sentinels = [Redis(host=host, port=port, **options) for host, port, options in self._sentinels]
        try:
            host, port = await finder.discover_master(self._service)
        finally:
            for sentinel in finder.sentinels:
                await sentinel.aclose()
        return str(host), int(port)
