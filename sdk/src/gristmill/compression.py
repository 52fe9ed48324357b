"""zstd bodies: how a group is made small, and how bytes of a stranger are made large again within a bound.

A group's bytes may travel and be stored as one zstd frame. Such bytes start with `MAGIC`, which no msgpack map and no
JSON text does, so nothing beside them has to say what they are.
"""

from __future__ import annotations

import zstandard

from gristmill.errors import GristmillError

MAGIC = zstandard.MAGIC_NUMBER.to_bytes(4, "little")
"""28 B5 2F FD."""
LEVEL = 1
"""Higher levels cost several times the time for a few per cent of a group, most of which is random mantissas."""
MAX_WINDOW = 8 << 20
"""Bytes of history that inflating a frame of unknown size may keep; RFC 9659 has this bound for HTTP."""
_STEP = 1 << 17


class CompressionError(GristmillError):
    """The bytes are not one whole zstd frame."""


class InflatedTooLarge(GristmillError):
    """The frame holds more bytes than the reader wants."""

    def __init__(self, limit: int) -> None:
        super().__init__("inflated_too_large", f"the zstd frame inflates to more than {limit} bytes", limit=limit)


def is_compressed(body: bytes) -> bool:
    return body.startswith(MAGIC)


def deflate(body: bytes) -> bytes:
    """One zstd frame, which says its content size."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(body)


def content_size(frame: bytes) -> int | None:
    """How many bytes the frame says it holds; None when it does not say. Raises CompressionError."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError as error:
        raise CompressionError("not_zstd", f"not a zstd frame: {error}") from error
    return None if size == zstandard.CONTENTSIZE_UNKNOWN else size


def inflate(frame: bytes, limit: int) -> bytes:
    """The content of exactly one zstd frame.

    Raises InflatedTooLarge before more than `limit` bytes were made, CompressionError for a truncated or damaged
    frame and for bytes after its end.
    """
    if not is_compressed(frame):
        raise CompressionError("not_zstd", "not a zstd frame: it does not start with 28 B5 2F FD")
    size = content_size(frame)
    if size is not None and size > limit:
        raise InflatedTooLarge(limit)
    try:
        if size is None:
            return _inflate_unsized(frame, limit)
        # The one buffer is as large as the frame says; a frame that lied is an error before it is overrun.
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CompressionError("zstd_frame_damaged", f"not one whole zstd frame: {error}") from error


def inflated(body: bytes, limit: int) -> bytes:
    """`body`, inflated when it is compressed. Raises as `inflate`."""
    return inflate(body, limit) if is_compressed(body) else body


def _inflate_unsized(frame: bytes, limit: int) -> bytes:
    """A frame made by a streaming compressor does not say how much it holds: count first, in steps."""
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(frame, read_across_frames=False)
    size = 0
    while step := len(reader.read(_STEP)):
        size += step
        if size > limit:
            raise InflatedTooLarge(limit)
    stream = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()
    content = stream.decompress(frame)
    if not stream.eof:
        raise CompressionError("zstd_frame_truncated", "not one whole zstd frame: it is truncated")
    if stream.unused_data:
        raise CompressionError(
            "zstd_frame_trailing_bytes", f"not one whole zstd frame: {len(stream.unused_data)} bytes follow it"
        )
    return content
