"""Weights in the device memory of a trainer on the same device (`publisher: ipc`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from gristmill.internal.device_memory import BUFFER, DeviceMemory, Place, decode_handle


class UnusableError(Exception):
    """The weights cannot be read, and no tensor of the server was changed.

    `args`: HTTP status, code and message of the refusal.
    """


@contextmanager
def mapped(folder: Path, device: torch.device) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yields the tensors that a version's folder describes, by the names of a model's files.

    They are views of the trainer's buffer, and are valid within the context. Raises UnusableError at the beginning, and
    RuntimeError at the end if the trainer has written to the buffer meanwhile.
    """
    try:
        memory = DeviceMemory.read(folder)
        buffer = _map(memory, folder, device)
    except (OSError, RuntimeError, ValueError, TypeError, msgspec.DecodeError) as error:
        text = f"the trainer's device memory cannot be read ({error}); set publisher: filesystem"
        raise UnusableError(422, "device_memory_unusable", text) from error
    try:
        if _token(buffer) != memory.token:
            text = "the trainer's device memory does not hold this version any more"
            raise UnusableError(
                503, "weights_replaced", text
            )  # 503 makes the trainer try again with its newest version
        yield ((name, _view(buffer, place)) for name, place in memory.tensors.items())
        if _token(buffer) != memory.token:
            raise RuntimeError("the trainer's device memory was written while the weights were loaded")
    finally:
        del buffer
        if device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _map(memory: DeviceMemory, folder: Path, device: torch.device) -> torch.Tensor:
    here = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
    if memory.device != here:
        raise ValueError(f"it is of {memory.device}, and this server computes on {here}")
    if device.type != "cuda":
        return torch.from_file(str(folder.parent / BUFFER), shared=False, size=memory.size, dtype=torch.uint8)
    arguments = [torch.cuda.current_device() if device.index is None else device.index, *decode_handle(memory.handle)]
    storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    buffer = torch.empty(0, dtype=torch.uint8, device=device)
    return buffer.set_(storage, 0, (memory.size,))  # type: ignore[call-overload, no-any-return]


def _token(buffer: torch.Tensor) -> int:
    return int(buffer[:8].view(torch.int64))


def _view(buffer: torch.Tensor, place: Place) -> torch.Tensor:
    part = buffer[place.offset : place.offset + place.size]
    return part.view(getattr(torch, place.dtype)).view(place.shape)
