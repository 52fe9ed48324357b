"""Sends the trainer's buffer of weights to the workers of model servers that ask for it (`publisher: nccl`)."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import nullcontext

import torch

from gristmill.internal.device_memory import PART, Part, Place, Sender, parts
from gristmill.internal.weight_network import TRAINER, WORKER, join, local_address, open_store, request_key, requests

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
        answered = 0
        while not self._closed.wait(_POLL):
            while answered < requests(self._store, self.description.secret):
                answered += 1
                threading.Thread(target=self._send, args=(answered,), name="send-weights", daemon=True).start()

    def _send(self, number: int) -> None:
        """Sends the token, the weights, and the token again, as a server reads them from a buffer that it maps.

        On CUDA, in a stream of its own: the trainer's computations and the messages do not wait for each other.
        """
        assert self._offered is not None
        buffer, messages = self._offered
        cuda, group = self._device.type == "cuda", None
        try:
            with torch.cuda.stream(torch.cuda.Stream(self._device)) if cuda else nullcontext():  # type: ignore[no-untyped-call]
                group = join(
                    torch.distributed,
                    self._store.clone(),
                    request_key(self.description.secret, number),
                    TRAINER,
                    self.description.host,
                    cuda=cuda,
                )
                token = Part(0, 8, ())
                for part in (token, *messages, token):
                    group.send([buffer[part.start : part.end]], WORKER, 0).wait()
                done = torch.empty(8, dtype=torch.uint8, device=self._device)
                group.recv([done], WORKER, 0).wait()  # A worker still reads when the last message is sent.
        except RuntimeError as error:
            _LOG.warning("a worker of a model server did not receive all weights: %s", str(error).partition("\n")[0])
        finally:
            if group is not None:
                group.abort()
