"""The connection between a trainer and one worker of a model server, which receives weights (`publisher: nccl`).

The trainer has a TCPStore. A worker that loads weights adds a request to the store. Trainer and worker then join a
process group of two for this request: over NCCL on CUDA, over gloo on a CPU. So the failure of a worker concerns no
other worker.

Both sides pass their `torch.distributed` as `c10d`, because the SDK has no torch.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Final

TRAINER: Final = 0
WORKER: Final = 1
"""Ranks in the process group."""
TIMEOUT: Final = timedelta(seconds=60)
"""Of one message, and of the other side's arrival. The server is paused while it waits for a message."""
_CONNECT: Final = 10.0
"""Seconds."""


def requests(store: Any, secret: str, more: int = 0) -> int:
    """Returns the number of requests in the store, after `more` are added. Each request is named by its number."""
    return int(store.add(f"{secret}/requests", more))


def request_key(secret: str, number: int) -> str:
    """Returns the beginning of the keys of a request's process group."""
    return f"{secret}/request/{number}"


def open_store(c10d: Any, host: str, port: int, listener: socket.socket | None = None) -> Any:
    """Returns the TCPStore at an address. `listener`: of the trainer, whose store it is, at this address.

    Raises OSError if nothing listens there. torch alone would try again until TIMEOUT.
    """
    if listener is None:
        socket.create_connection((host, port), timeout=_CONNECT).close()
    own = None if listener is None else listener.detach()
    # Read by NCCL's process groups: a message that fails raises an error, and does not end the process.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "1"
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(int(TIMEOUT.total_seconds()))
    return c10d.TCPStore(
        host, port, is_master=own is not None, wait_for_workers=False, master_listen_fd=own, timeout=TIMEOUT
    )


def join(c10d: Any, store: Any, request: str, rank: int, host: str, *, cuda: bool) -> Any:
    """Returns the process group of one request. Raises RuntimeError if the other side does not come in time.

    `request`: its key. `host`: this machine's address towards the other side.
    """
    own = c10d.PrefixStore(request, store)
    if cuda:
        options = c10d.ProcessGroupNCCL.Options()
        options.config.blocking = 0  # else the set-up of a connection would have no time-out
        options._timeout = TIMEOUT
        return c10d.ProcessGroupNCCL(own, rank, 2, options)
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
    return c10d.ProcessGroupGloo(own, rank, 2, options)


def local_address(host: str, port: int) -> str:
    """Returns the address of this machine on the way to another one. Sends nothing. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as unused:
        unused.connect(address)
        return str(unused.getsockname()[0])
