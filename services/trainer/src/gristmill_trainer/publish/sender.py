"""Sends the trainer's buffer of weights to the workers of model servers that ask for it (`publisher: nccl`)."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Mapping

import torch

from gristmill.internal.device_memory import PART, Part, Place, Sender, parts
from gristmill.internal.weight_network import TRAINER, WORKER, join, local_address, open_store, request_key

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
        self._thread = threading.Thread(target=self._answer, name="send-weights", daemon=True)
        self._thread.start()

    def offer(self, buffer: torch.Tensor, places: Mapping[str, Place]) -> None:
        """From now on, sends `buffer`, uint8[bytes], with tensors at `places`."""
        self._offered = buffer, parts(places, self.description.part)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _answer(self) -> None:
        number = 1
        while not self._closed.wait(_POLL):
            while self._store.check([request_key(self.description.secret, number)]):
                threading.Thread(target=self._send, args=(number,), name="send-weights", daemon=True).start()
                number += 1

    def _send(self, number: int) -> None:
        """Sends the token, the weights, and the token again, as a server reads them from a buffer that it maps."""
        assert self._offered is not None
        buffer, messages = self._offered
        request = request_key(self.description.secret, number)
        try:
            store, host, cuda = self._store.clone(), self.description.host, self._device.type == "cuda"
            group = join(torch.distributed, store, request, TRAINER, host, cuda=cuda)
            token = Part(0, 8, ())
            for part in (token, *messages, token):
                group.send([buffer[part.start : part.end]], WORKER, 0).wait()
            group.shutdown()
        except RuntimeError as error:
            _LOG.warning("a worker of a model server did not receive all weights: %s", str(error).partition("\n")[0])
