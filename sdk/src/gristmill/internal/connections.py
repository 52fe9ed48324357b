"""HTTP clients that reach the stack's own servers without a proxy, and fail when the other machine is gone.

The variables HTTP_PROXY, HTTPS_PROXY and ALL_PROXY name a proxy to the internet. The trajectory API and the model
servers are not there: a proxy would refuse the request or send it to another machine. So a client of a loopback or
private address, or of a name without a public domain, never uses a proxy. A client of another host, such as a public
API of text, uses the proxy unless NO_PROXY names the host.

The kernel closes the connections of a process that ends. No kernel closes the connections of a machine that lost its
power or its network: a request would wait for its answer until its time-out, which is ten minutes for the loading of
weights. With TCP keep-alive the kernel asks a silent machine, and the request fails after `GONE_S`. A process that is
busy or stopped is not gone: its kernel answers.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from gristmill.errors import ConfigError
from gristmill.internal.redaction import redact_text

GONE_S: Final = 30
"""Seconds without any packet from the other machine after which a connection fails."""
_EVERY_S: Final = 5
_WANTED: Final = {
    "TCP_KEEPIDLE": GONE_S - 4 * _EVERY_S,
    "TCP_KEEPINTVL": _EVERY_S,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": GONE_S * 1000,  # For data that the other machine has not confirmed.
}
# macOS has only some of these options.
_OPTIONS: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _WANTED.items() if hasattr(socket, name)),
]
_PRIVATE_DOMAINS: Final = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc")
"""Domains that no public name server has. Kubernetes ends the names of its services in .svc or .svc.cluster.local."""
_IDLE_S: Final = 4.0
"""Seconds for which a connection without a request stays open. uvicorn, also vLLM's, closes it after 5 seconds: a
request that meets the close fails, and a model server would count as away."""
_LIMITS: Final = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=_IDLE_S)
"""The defaults of httpx, except for the time."""
_ONE: Final = httpx.Limits(max_connections=1, keepalive_expiry=_IDLE_S)

T = TypeVar("T")


def client(url: str, *, limits: httpx.Limits = _LIMITS, **options: Any) -> httpx.Client:  # noqa: TID251
    """Returns a client of the server at `url`. `options`: of httpx.Client. Raises ConfigError for an unusable proxy."""
    transport = _transport(httpx.HTTPTransport, url, limits)
    return httpx.Client(base_url=url, transport=transport, **options)  # noqa: TID251


def async_client(url: str, *, limits: httpx.Limits | None = _LIMITS, **options: Any) -> httpx.AsyncClient:  # noqa: TID251
    """Returns the same as `client`, for asyncio. `limits`: None for any number of connections."""
    transport: httpx.AsyncBaseTransport
    if limits is None:
        transport = _AnyNumber(lambda: _transport(httpx.AsyncHTTPTransport, url, _ONE))
    else:
        transport = _transport(httpx.AsyncHTTPTransport, url, limits)
    return httpx.AsyncClient(base_url=url, transport=transport, **options)  # noqa: TID251


def proxy_for(url: str) -> str | None:
    """Returns the proxy that the environment names for `url`, or None if the client connects to the server itself."""
    parts = urlsplit(url)
    if _is_own(parts.hostname or "") or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    named = getproxies()
    proxy = named.get(parts.scheme) or named.get("all")
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def _is_own(host: str) -> bool:
    """Whether `host` is an address or a name that only this machine or its network can reach."""
    host = host.lower().removesuffix(".")
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith(_PRIVATE_DOMAINS) or ".svc." in host or host == socket.gethostname()


class _AnyNumber(httpx.AsyncBaseTransport):
    """Sends each request on a connection that is free, or on a new one.

    httpx's own pool compares all connections with each other for each request. With 256 connections, the comparison
    takes hundreds of milliseconds of processor time. Here each pool has only one connection.
    """

    def __init__(self, open_one: Callable[[], httpx.AsyncHTTPTransport]) -> None:
        """`open_one`: returns a transport of at most one connection. Raises what it raises."""
        self._open_one = open_one
        self._free = deque([(open_one(), time.monotonic())])
        """The connections without a request, and the times since when; the last one was used last."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the connections."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request. Raises httpx.TransportError."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # A second asyncio.run cannot use the connections of the first one.
            self._loop, self._free = loop, deque()
        one = self._free.pop()[0] if self._free else self._open_one()
        try:
            response = await one.handle_async_request(request)
        except BaseException:
            # After a cancelled request the pool may count a connection that nothing closes. Another request would then
            # wait for this connection without limit.
            await one.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Watched(response.stream, lambda: self._give_back(one), one.aclose)
        return response

    async def aclose(self) -> None:
        """Closes the connections. Those with a request close when its answer is read."""
        free, self._free = self._free, deque()
        for one, _ in free:
            await one.aclose()

    async def _give_back(self, one: httpx.AsyncHTTPTransport) -> None:
        now = time.monotonic()
        self._free.append((one, now))
        while self._free and self._free[0][1] <= now - _IDLE_S:
            await self._free.popleft()[0].aclose()


class _Watched(httpx.AsyncByteStream):
    """The body of an answer. Reports once that it is closed, or that it failed and its connection cannot be used."""

    def __init__(
        self, body: httpx.AsyncByteStream, closed: Callable[[], Awaitable[None]], failed: Callable[[], Awaitable[None]]
    ) -> None:
        self._body, self._closed, self._failed = body, closed, failed
        self._is_over = self._has_failed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._body:
                yield part
        except BaseException:  # The body closes itself then, and a second cancellation may interrupt this.
            self._has_failed = True
            raise

    async def aclose(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        try:
            await self._body.aclose()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            await (self._failed() if self._has_failed else self._closed())


@functools.lru_cache(maxsize=4)
def _context(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Returns one context for all clients: reading all certificate authorities takes 50 ms of processor time.

    `file`, `folder`: the variables that httpx reads; other values need another context.
    """
    return httpx.create_ssl_context()


def _transport(kind: Callable[..., T], url: str, limits: httpx.Limits) -> T:
    # A client that is given its transport does not read the proxies of the environment.
    proxy = proxy_for(url)
    try:
        context = _context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        return kind(verify=context, limits=limits, proxy=proxy, socket_options=_OPTIONS)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        if proxy is None:
            raise
        redacted = redact_text(proxy)
        raise ConfigError(
            "proxy_unusable",
            f"the environment names the proxy {redacted} for {redact_text(url)}, and the proxy cannot be used "
            f"({error}); name an HTTP proxy in HTTPS_PROXY and HTTP_PROXY, or name the host in NO_PROXY.",
            proxy=redacted,
            url=redact_text(url),
        ) from error
