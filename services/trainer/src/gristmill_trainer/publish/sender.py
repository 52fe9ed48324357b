"""Sends the trainer's buffer of weights to the workers of model servers that ask for it (`publisher: nccl`)."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import nullcontext, suppress

import torch

from gristmill.internal.device_memory import PART, Part, Place, Sender, parts
from gristmill.internal.weight_network import (
    TIMEOUT,
    TRAINER,
    WORKER,
    join,
    local_address,
    open_store,
    request_key,
    requests,
)

_LOG = logging.getLogger(__name__)
_POLL = 0.02
"""Seconds between two looks for requests."""


class WeightSender:
    """Answers each request in a thread of its own, so that no worker waits for another."""

    def __init__(self, server: tuple[str, int], device: torch.device) -> None:
        """`server`: host and port of a model server. The sender listens on the address that reaches it, and on no
        other. `device`: of the buffer. Raises OSError if the host is unknown."""
        host = local_address(*server)
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port: int = listener.getsockname()[1]
        self.description = Sender(host, port, secrets.token_hex(16), PART)
        """What a worker needs to ask."""
        self._device = device
        self._store = open_store(torch.distributed, host, port, listener)
        self._offered: tuple[torch.Tensor, list[Part]] | None = None
        self._closed = threading.Event()
        self._sending: set[threading.Thread] = set()
        self._thread = threading.Thread(target=self._answer, name="send-weights", daemon=True)
        self._thread.start()

    def offer(self, buffer: torch.Tensor, places: Mapping[str, Place]) -> None:
        """From now on, sends `buffer`, uint8[bytes], with tensors at `places`."""
        self._offered = buffer, parts(places, self.description.part)

    def close(self) -> None:
        """Returns when all threads have ended: a thread that waits within torch would crash the end of the process.

        A worker that hangs delays this by TIMEOUT.
        """
        self._closed.set()
        self._thread.join()
        self._store = None  # ends waits for a worker that has not joined
        for thread in list(self._sending):
            thread.join(timeout=2 * TIMEOUT.total_seconds())

    def _answer(self) -> None:
        answered = 0
        while not self._closed.wait(_POLL):
            try:
                number = requests(self._store, self.description.secret)
            except RuntimeError as error:
                _LOG.error("no weights can be sent any more: %s", error)
                return
            while answered < number:
                answered += 1
                thread = threading.Thread(target=self._send, args=(answered,), name="send-weights", daemon=True)
                self._sending.add(thread)
                thread.start()

    def _send(self, number: int) -> None:
        """Sends the token, the weights, and the token again, as a server reads them from a buffer that it maps.

        On CUDA, in a stream of its own: the trainer's computations and the messages do not wait for each other.
        """
        assert self._offered is not None
        buffer, messages = self._offered
        cuda, group = self._device.type == "cuda", None
        try:
            with torch.cuda.stream(torch.cuda.Stream(self._device)) if cuda else nullcontext():  # type: ignore[no-untyped-call]
                own = self.description
                store = open_store(torch.distributed, own.host, own.port)
                group = join(
                    torch.distributed, store, request_key(own.secret, number), TRAINER, own.host, cuda=cuda
                )  # fmt: skip
                token, done = Part(0, 8, ()), torch.empty(8, dtype=torch.uint8, device=self._device)
                for part in (token, *messages, token):
                    group.send([buffer[part.start : part.end]], WORKER, 0).wait()
                group.recv([done], WORKER, 0).wait()  # A worker still reads when the last message is sent.
        except (OSError, RuntimeError) as error:
            _LOG.warning("a worker of a model server did not receive all weights: %s", str(error).partition("\n")[0])
        finally:
            if group is not None:
                with suppress(RuntimeError):  # It has been reported, or all weights have arrived.
                    group.abort()
            self._sending.discard(threading.current_thread())
