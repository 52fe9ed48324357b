"""Connections that fail when the other machine is gone.

The kernel closes the connections of a process that ends. Nobody closes those of a machine that lost its power or its
network: a request would wait for its answer until its time-out, which is ten minutes for the loading of weights. With
TCP keep-alive the kernel asks a silent machine, and the request fails after `GONE_S`. A process that is busy or stopped
is not gone: its kernel answers.
"""

from __future__ import annotations

import socket
from typing import Final
from urllib.request import getproxies

import httpx

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


def transport() -> httpx.HTTPTransport | None:
    """Returns a transport for httpx.Client.

    None, which is httpx's default, if the environment names a proxy: the connection then ends at the proxy.
    """
    return None if getproxies() else httpx.HTTPTransport(socket_options=_OPTIONS)


def async_transport(limits: httpx.Limits) -> httpx.AsyncHTTPTransport | None:
    """Returns the same for httpx.AsyncClient. `limits`: of the connection pool."""
    return None if getproxies() else httpx.AsyncHTTPTransport(limits=limits, socket_options=_OPTIONS)
