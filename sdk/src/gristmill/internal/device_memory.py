"""The file that describes weights in a trainer's device memory.

With `publisher: ipc` and `publisher: nccl`, the trainer copies each version into one buffer. In place of the weights,
it writes this file into the version's folder. A server on the same device maps the buffer (ipc). Any other server
receives it over the network (nccl). The first 8 bytes of the buffer are the version's token, and 0 while the trainer
writes. So a server that reads the token before and after its copy has the weights of one version.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

FILE: Final = "device_memory.json"
BUFFER: Final = ".device_memory"
"""On a CPU, the buffer is this file, in the same folder as the versions."""
HEADER: Final = 256
"""Bytes before the first tensor. Each tensor begins at a multiple of this number."""

PART: Final = 256 << 20
"""Most bytes of one message over the network, unless a single tensor is larger."""

Handle = list[int | bool | dict[Literal["bytes"], str]]
"""The arguments of torch.UntypedStorage._new_shared_cuda after the device, with bytes in base64."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor is in the buffer."""

    dtype: str
    """Of torch, such as bfloat16."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the buffer."""
    size: int
    """Bytes."""


class Part(NamedTuple):
    """Consecutive tensors of the buffer, which are one message."""

    start: int
    end: int
    """Bytes from the beginning of the buffer."""
    names: tuple[str, ...]


def parts(tensors: Mapping[str, Place], limit: int) -> list[Part]:
    """Returns the parts that hold all tensors with elements, in the buffer's order. `limit`: as PART."""
    found: list[Part] = []
    for name, place in sorted(tensors.items(), key=lambda item: item[1].offset):
        end = place.offset + place.size
        if not place.size:
            continue
        if found and end - found[-1].start <= limit:
            found[-1] = Part(found[-1].start, end, (*found[-1].names, name))
        else:
            found.append(Part(place.offset, end, (name,)))
    return found


class Sender(msgspec.Struct, frozen=True):
    """Where a worker asks for the buffer."""

    host: str
    port: int
    secret: str
    """The beginning of every key of a request, so that only a reader of this file can ask."""
    part: int
    """Most bytes of a message with several tensors."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="gristmill-device-memory-1"):
    """One version of the weights in the buffer."""

    device: str
    """UUID of the GPU, or "cpu"."""
    token: int
    """The first 8 bytes of the buffer as long as it holds this version. Never 0."""
    size: int
    """Bytes of the buffer."""
    tensors: dict[str, Place]
    """By the names of a model's files."""
    handle: Handle = []
    """Of a GPU's buffer that a server can map."""
    sender: Sender | None = None
    """Sends the buffer, if the server is not to map it."""

    @staticmethod
    def read(folder: Path) -> DeviceMemory:
        """Reads the file in a version's folder. Raises OSError, and msgspec.DecodeError for another file."""
        return msgspec.json.decode((folder / FILE).read_bytes(), type=DeviceMemory)


def encode_handle(arguments: tuple[Any, ...]) -> Handle:
    """Returns arguments of torch in a form for JSON, which has no bytes."""
    return [{"bytes": b64encode(one).decode()} if isinstance(one, bytes) else one for one in arguments]


def decode_handle(handle: Handle) -> list[int | bool | bytes]:
    """Returns the arguments that `encode_handle` got. Raises ValueError for bytes that are not base64."""
    return [b64decode(one["bytes"], validate=True) if isinstance(one, dict) else one for one in handle]
