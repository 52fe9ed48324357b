"""Ports of this machine for servers that the tests start."""

from __future__ import annotations

import random
import socket

_held: list[socket.socket] = []


def free_port() -> int:
    """A TCP port for a server of 127.0.0.1, this process' until it ends, also while that server is down.

    It is bound and not listened on. Linux lets a server that asks for SO_REUSEADDR, as all here do, listen beside that,
    and gives the port to nobody who wants a free one.
    """
    holder = socket.socket()
    while True:
        try:
            # Below what the kernel gives to clients' ends, which a restarted server would have to wait for.
            holder.bind(("127.0.0.1", random.SystemRandom().randrange(12_000, 32_000)))
        except OSError:
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Not before: two could have bound it.
        _held.append(holder)
        port: int = holder.getsockname()[1]
        return port
