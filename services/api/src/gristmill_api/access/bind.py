"""Where this process listens.

The server that runs the application binds after the application has started, and does not tell it where. So the
process' own listening sockets are looked at: they are the truth for --host, --fd, a reloader and several workers.
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
    """Log where the process listens, once it does; warn if other machines may then do what they like."""
    for _ in range(_LOOKS):
        addresses = listening()
        if addresses:
            break
        # Nothing announces that the server has bound; it does so right after the application's start.
        await asyncio.sleep(_LOOK_EVERY_S)
    else:
        return
    at = ",".join(f"{host}:{port}" for host, port in addresses)
    _LOG.info(line("api", listens=at, auth=settings.auth))
    private = settings.in_compose or all(_loopback(host) for host, _ in addresses)
    if settings.tokens is None and not private:
        _LOG.warning(
            "THE API IS OPEN TO THE NETWORK: it listens at %s and API_AUTH is none, so whoever reaches that port may "
            "read, submit and delete. Bind it to 127.0.0.1, or turn tokens on: make secure (docs/security.md).",
            at,
        )


def listening() -> list[tuple[str, int]]:
    """Addresses at which this process accepts TCP connections; empty where they cannot be told."""
    found = []
    for descriptor in _descriptors():
        # A descriptor may be closed meanwhile, as is the one that the folder was listed with.
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
