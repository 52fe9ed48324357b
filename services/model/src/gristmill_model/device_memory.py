"""Weights in the device memory of a trainer: on the same device (`publisher: ipc`), or on another (`nccl`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch

from gristmill.internal.device_memory import BUFFER, DeviceMemory, Place, Sender, decode_handle, parts
from gristmill.internal.weight_network import TRAINER, WORKER, join, local_address, open_store, request_key, requests

_Tensors = Iterator[tuple[str, torch.Tensor]]


class UnusableError(Exception):
    """The weights cannot be read, and no tensor of the server was changed.

    `args`: HTTP status, code and message of the refusal.
    """


@contextmanager
def weights_of(folder: Path, device: torch.device) -> Iterator[_Tensors]:
    """Yields the tensors that a version's folder describes, by the names of a model's files.

    They are valid within the context. Raises UnusableError at the beginning. Raises RuntimeError from the iterator, or
    at the end, if the trainer ends or has written to its buffer meanwhile.
    """
    try:
        memory = DeviceMemory.read(folder)
        source = _Mapped(memory, folder, device) if memory.sender is None else _Received(memory, memory.sender, device)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        text = f"the trainer's device memory cannot be read ({error}); set publisher: filesystem"
        raise UnusableError(422, "device_memory_unusable", text) from error
    try:
        if source.token != memory.token:
            # 503 makes the trainer try again with its newest version.
            text = "the trainer's device memory does not hold this version any more"
            raise UnusableError(503, "weights_replaced", text)
        yield source.tensors()
        if source.last_token() != memory.token:
            raise RuntimeError("the trainer's device memory was written while the weights were loaded")
    finally:
        source.close()


class _Mapped:
    """The buffer of a trainer on this device. The tensors are views of it."""

    def __init__(self, memory: DeviceMemory, folder: Path, device: torch.device) -> None:
        if memory.device != _name(device):
            raise ValueError(f"it is of {memory.device}, and this server computes on {_name(device)}")
        self._memory, self._device = memory, device
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            storage = torch.UntypedStorage._new_shared_cuda(index, *decode_handle(memory.handle))
            self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
            self._buffer.set_(storage, 0, (memory.size,))  # type: ignore[call-overload]
        else:
            file = str(folder.parent / BUFFER)
            self._buffer = torch.from_file(file, shared=False, size=memory.size, dtype=torch.uint8)
        self.token = self.last_token()

    def last_token(self) -> int:
        return _token(self._buffer)

    def tensors(self) -> _Tensors:
        return ((name, _view(self._buffer, place, 0)) for name, place in self._memory.tensors.items())

    def close(self) -> None:
        del self._buffer
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


class _Received:
    """The buffer of a trainer on another device, which sends its token, its parts and its token again."""

    _group: Any = None
    _before: ClassVar[Any] = None
    """Process group of the last load that succeeded. Its last message, to the trainer, may still be on its way, so it
    stays open until the next load."""

    def __init__(self, memory: DeviceMemory, sender: Sender, device: torch.device) -> None:
        """Raises UnusableError if the trainer cannot be reached."""
        here = _name(device)
        if (memory.device == "cpu") != (here == "cpu"):
            raise ValueError(f"it is of {memory.device}, and this server computes on {here}")
        if memory.device == here and device.type == "cuda":
            raise ValueError("the trainer is on the same GPU, and NCCL needs two; publisher: ipc needs one")
        self._memory, self._device = memory, device
        self._parts = parts(memory.tensors, sender.part)
        self._complete = False
        before, _Received._before = _Received._before, None
        _abort(before)
        try:
            store = open_store(torch.distributed, sender.host, sender.port)
            request = request_key(sender.secret, requests(store, sender.secret, 1))
            own, cuda = local_address(sender.host, sender.port), device.type == "cuda"
            self._group = join(torch.distributed, store, request, WORKER, own, cuda=cuda)
            self.token = _token(self._message(8))
        except (OSError, RuntimeError) as error:
            self.close()
            reason = str(error).partition("\n")[0]
            text = f"the trainer at {sender.host}:{sender.port} does not send its weights ({reason})"
            raise UnusableError(503, "trainer_unreachable", text) from error

    def last_token(self) -> int:
        header = self._message(8)
        self._group.send([header], TRAINER, 0).wait()
        self._complete = True
        return _token(header)

    def tensors(self) -> _Tensors:
        for part in self._parts:
            message = self._message(part.end - part.start)
            for name in part.names:
                yield name, _view(message, self._memory.tensors[name], part.start)
        for name, place in self._memory.tensors.items():
            if not place.size:
                yield name, _view(self._message(0), place, place.offset)

    def _message(self, size: int) -> torch.Tensor:
        message = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size:
            self._group.recv([message], TRAINER, 0).wait()
        return message

    def close(self) -> None:
        group, self._group = self._group, None  # gloo closes a connection without a reference to its group
        if self._complete:
            _Received._before = group
        else:
            _abort(group)


def _abort(group: Any) -> None:
    """Closes a process group, or None. What failed in it has been reported."""
    if group is not None:
        with suppress(RuntimeError):
            group.abort()


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def _token(header: torch.Tensor) -> int:
    return int(header[:8].view(torch.int64))


def _view(buffer: torch.Tensor, place: Place, start: int) -> Any:
    """Returns a tensor of `buffer`, whose first byte is at `start` of the trainer's buffer."""
    part = buffer[place.offset - start : place.offset - start + place.size]
    return part.view(getattr(torch, place.dtype)).view(place.shape)
