"""The body of a leased batch (`application/vnd.gristmill.batch.v1+msgpack`).

The body is one msgpack array of msgpack `bin` objects: the bytes of each group, in submit order:

    array header   0x90 + n (n < 16), 0xdc + u16, or 0xdd + u32
    n times        bin header 0xc4 + u8, 0xc5 + u16, or 0xc6 + u32 length, then the group's bytes

Integers are big-endian and headers are as short as possible, so any msgpack reader decodes the body as list[bytes]:
`msgspec.msgpack.decode(body, type=list[bytes])`. The API only joins the bytes of groups; it does not decode a group.
The response has a Content-Length, so a broken transfer cannot look like a short batch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

PART_BYTES: Final = 2 * 1024 * 1024
"""A batch is read from Redis and sent in parts of this size, which bounds the memory of one lease."""


def array_header(count: int) -> bytes:
    if count < 16:
        return bytes([0x90 | count])
    if count < 1 << 16:
        return struct.pack(">BH", 0xDC, count)
    return struct.pack(">BI", 0xDD, count)


def bin_header(size: int) -> bytes:
    """Returns the header of `size` bytes, less than 4 GiB."""
    if size < 1 << 8:
        return struct.pack(">BB", 0xC4, size)
    if size < 1 << 16:
        return struct.pack(">BH", 0xC5, size)
    return struct.pack(">BI", 0xC6, size)


def length(sizes: Sequence[int]) -> int:
    """Returns the bytes of the whole body for groups of these sizes."""
    return len(array_header(len(sizes))) + sum(len(bin_header(size)) + size for size in sizes)


def parts(groups: Sequence[T], size: Callable[[T], int]) -> list[list[T]]:
    """Returns a batch in order, cut so that each part has at most PART_BYTES or is one group."""
    cut: list[list[T]] = []
    room = 0
    for group in groups:
        if not cut or size(group) > room:
            cut.append([])
            room = PART_BYTES
        cut[-1].append(group)
        room -= size(group)
    return cut
