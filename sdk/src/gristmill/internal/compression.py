"""zstd compression of the archive, and decompression of untrusted bytes up to a size limit."""

from __future__ import annotations

import zstandard

from gristmill.errors import GristmillError

MAGIC = zstandard.MAGIC_NUMBER.to_bytes(4, "little")
"""28 B5 2F FD."""
LEVEL = 1
"""Higher levels take several times as long and save a few per cent, because most bytes of a group are random
mantissas."""
MAX_WINDOW = 8 << 20
"""Most bytes of history that decompression of a frame of unknown size keeps. RFC 9659 sets this limit for HTTP."""
_STEP = 1 << 17


class CompressionError(GristmillError):
    """The bytes are not one whole zstd frame."""


class InflatedTooLarge(GristmillError):
    """The frame holds more bytes than the reader's limit."""

    def __init__(self, limit: int) -> None:
        super().__init__("inflated_too_large", f"the zstd frame inflates to more than {limit} bytes", limit=limit)


def is_compressed(body: bytes) -> bool:
    return body.startswith(MAGIC)


def deflate(body: bytes) -> bytes:
    """Returns one zstd frame, which states its content size."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(body)


def content_size(frame: bytes) -> int | None:
    """Returns the frame's stated content size in bytes, or None if the frame states none. Raises CompressionError."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError as error:
        raise CompressionError("not_zstd", f"not a zstd frame: {error}") from error
    return None if size == zstandard.CONTENTSIZE_UNKNOWN else size


def inflate(frame: bytes, limit: int) -> bytes:
    """Returns the content of exactly one zstd frame.

    Raises InflatedTooLarge before it keeps more than `limit` bytes. Raises CompressionError for a truncated or damaged
    frame and for bytes after the frame's end.
    """
    if not is_compressed(frame):
        raise CompressionError("not_zstd", "not a zstd frame: it does not start with 28 B5 2F FD")
    size = content_size(frame)
    if size is not None and size > limit:
        raise InflatedTooLarge(limit)
    try:
        if size is None:
            return _inflate_unsized(frame, limit)
        # The buffer has the frame's stated size. If that size is wrong, zstd raises an error before it overruns the
        # buffer.
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CompressionError("zstd_frame_damaged", f"not one whole zstd frame: {error}") from error


def _inflate_unsized(frame: bytes, limit: int) -> bytes:
    """Counts the content of a frame without a stated size in steps, and then returns the content."""
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
