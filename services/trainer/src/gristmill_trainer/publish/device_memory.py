"""Publication without a copy to the host: `publisher: ipc` and `publisher: nccl`.

The trainer copies the weights into a buffer in its device memory, and the servers copy them from there into their own
tensors. With ipc, servers are on the trainer's GPU: a server maps the buffer while it loads, and holds no reference
afterwards. With nccl, servers are on other GPUs, and receive the buffer.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec
import torch

from gristmill.internal.device_memory import BUFFER, FILE, HEADER, DeviceMemory, Handle, Place, encode_handle
from gristmill.internal.disk import write_file
from gristmill_trainer.publish.pool import ModelServers
from gristmill_trainer.publish.publisher import FilesystemTransport, Tensors
from gristmill_trainer.publish.sender import WeightSender


class DeviceMemoryTransport(FilesystemTransport):
    """Writes `folder`/<version>/device_memory.json, and lets `servers` load the buffer that it describes."""

    def __init__(
        self,
        servers: ModelServers,
        folder: Path,
        served_weights: Path | None,
        original: Path | None = None,
        *,
        device: torch.device,
        sender: WeightSender | None = None,
    ) -> None:
        """`device`: of the buffer. `sender`: for servers that are not on this device."""
        super().__init__(servers, folder, served_weights, original=original)
        self._device = device
        self._sender = sender
        self._buffer: torch.Tensor | None = None
        self._handle: Handle = []
        self._places: dict[str, Place] = {}
        self._views: dict[str, torch.Tensor] = {}
        """The tensors in the buffer."""

    def copied(self, tensors: Tensors) -> Tensors:
        self._fill(tensors)
        return self._views

    def _save(self, tensors: Tensors, folder: Path) -> None:
        if tensors is not self._views:
            self._fill(tensors)
        assert self._buffer is not None
        description = DeviceMemory(
            device=_name(self._device),
            token=int(_token(self._buffer)),
            size=len(self._buffer),
            tensors=self._places,
            handle=self._handle,
            sender=None if self._sender is None else self._sender.description,
        )
        # The server runs as another user of the same group.
        write_file(folder / FILE, msgspec.json.encode(description), mode=0o640)

    def close(self) -> None:
        super().close()
        if self._sender is not None:
            self._sender.close()

    def _fill(self, tensors: Tensors) -> None:
        """Copies the tensors into the buffer, under a new token."""
        places, size = _layout(tensors)
        if self._buffer is None or places != self._places:
            self._views, self._buffer = {}, None  # the memory of the old buffer may serve the new one
            self._buffer, self._places = self._allocate(size), places
            if self._sender is not None:
                self._sender.offer(self._buffer, places)
            elif self._buffer.is_cuda:
                # Exported once: torch keeps a record of each export as long as the buffer exists. The last argument is
                # whether to wait for an event, which `_synchronize` makes unnecessary.
                exported = self._buffer.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
                self._handle = encode_handle((*exported[1:-1], False))
            self._views = {name: _view(self._buffer, place) for name, place in places.items()}
        token = _token(self._buffer)
        token.fill_(0)
        self._synchronize()
        for name, tensor in tensors.items():
            self._views[name].copy_(tensor.detach())
        self._synchronize()
        token.fill_(secrets.randbits(62) | 1)
        self._synchronize()

    def _allocate(self, size: int) -> torch.Tensor:
        if self._device.type == "cuda" or self._sender is not None:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        file = self._folder / BUFFER
        file.unlink(missing_ok=True)  # A server may still read the old one.
        file.touch(mode=0o644)  # The server runs as another user of the same group.
        return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)

    def _synchronize(self) -> None:
        """Waits until the device has carried out all copies."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _layout(tensors: Tensors) -> tuple[dict[str, Place], int]:
    """Returns the place of each tensor, and the bytes of the buffer."""
    places, end = {}, HEADER
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        places[name] = Place(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, size)
        end += -(-size // HEADER) * HEADER
    return places, end


def _view(buffer: torch.Tensor, place: Place) -> torch.Tensor:
    part = buffer[place.offset : place.offset + place.size]
    return part.view(getattr(torch, place.dtype)).view(place.shape)


def _token(buffer: torch.Tensor) -> torch.Tensor:
    return buffer[:8].view(torch.int64)


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
