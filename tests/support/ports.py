"""Ports of this machine for servers that the tests start."""

from __future__ import annotations

import random
import socket

_held: list[socket.socket] = []


def free_port() -> int:
    """Returns a TCP port for a server of 127.0.0.1. The port belongs to this process until it ends, also while that
    server is down.

    This process binds the port and does not listen on it. All servers here ask for SO_REUSEADDR, so Linux lets them
    listen on the same port. Linux never gives the port to a process that asks for a free port.
    """
    holder = socket.socket()
    while True:
        try:
            # Below the kernel's range for clients, because a restarted server would have to wait for such a port.
            holder.bind(("127.0.0.1", random.SystemRandom().randrange(12_000, 32_000)))
        except OSError:
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Not before: two could have bound it.
        _held.append(holder)
        port: int = holder.getsockname()[1]
        return port
