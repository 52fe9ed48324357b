"""Ports of this machine for servers that the tests start."""

from __future__ import annotations

import itertools
import os
import random
import socket

# The kernel gives ports of 32768 and more to whoever asks for any.
_FIRST, _EACH = 12_000, 2_500
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_offsets = itertools.count(random.SystemRandom().randrange(_EACH))


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on. It stays free until it is bound, also while its server is down:
    it is given once a process, no other of the session's processes gives it, and the kernel gives it to nobody."""
    for offset in itertools.islice(_offsets, _EACH):
        port = _FIRST + _WORKER * _EACH + offset % _EACH
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"none of the {_EACH} ports from {_FIRST + _WORKER * _EACH} on is free")
