"""Logs the addresses at which this process listens, and warns if other machines reach the API without a token.

The server binds after the application has started, and does not report the address to the application. So this module
reads the process' own listening sockets, which are right for --host, --fd, a reloader and several workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import stat
from pathlib import Path
from typing import Final

from gristmill.logs import line
from gristmill_api.access.settings import AccessSettings

_LOG = logging.getLogger(__name__)
_DESCRIPTORS: Final = Path("/dev/fd")  # Linux and macOS
_LOOK_EVERY_S: Final = 0.1
_LOOKS: Final = 100


async def tell_bind(settings: AccessSettings) -> None:
    """Log the addresses once the process listens. Warn if other machines reach the API and need no token."""
    for _ in range(_LOOKS):
        addresses = listening()
        if addresses:
            break
        # No event reports that the server has bound its port. It binds right after the application's start.
        await asyncio.sleep(_LOOK_EVERY_S)
    else:
        return
    at = ",".join(f"{host}:{port}" for host, port in addresses)
    _LOG.info(line("api", listens=at, auth=settings.auth))
    private = settings.in_compose or all(_loopback(host) for host, _ in addresses)
    if settings.tokens is None and not private:
        _LOG.warning(
            "THE API IS OPEN TO THE NETWORK: it listens at %s and API_AUTH is none, so any client that reaches that "
            "port can read, submit and delete. Bind the API to 127.0.0.1, or turn on tokens: make secure "
            "(docs/security.md).",
            at,
        )


def listening() -> list[tuple[str, int]]:
    """Returns the addresses at which this process accepts TCP connections; empty if the system does not list them."""
    found = []
    for descriptor in _descriptors():
        # A descriptor may be closed meanwhile. The descriptor that listed the folder is.
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as here:
                internet = here.family in (socket.AF_INET, socket.AF_INET6)
                if internet and here.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    host, port = here.getsockname()[:2]
                    found.append((host, port))
    return found


def _descriptors() -> list[int]:
    return [int(entry.name) for entry in _DESCRIPTORS.iterdir()] if _DESCRIPTORS.is_dir() else []


def _loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
