"""zstd compression of the archive, and decompression of untrusted bytes up to a size limit."""

from __future__ import annotations

import zstandard

from gristmill.errors import GristmillError

_MAGIC = zstandard.MAGIC_NUMBER.to_bytes(4, "little")
LEVEL = 1
"""Higher levels take several times as long and save a few per cent, because most bytes of a group are random
mantissas."""


class CompressionError(GristmillError):
    """The bytes are not one whole zstd frame."""


class InflatedTooLarge(GristmillError):
    """The frame holds more bytes than the reader's limit."""

    def __init__(self, limit: int) -> None:
        super().__init__("inflated_too_large", f"the zstd frame inflates to more than {limit} bytes", limit=limit)


def deflate(body: bytes) -> bytes:
    """Returns one zstd frame, which states its content size."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(body)


def inflate(frame: bytes, limit: int) -> bytes:
    """Returns the content of exactly one frame of `deflate`, of at most `limit` bytes.

    Raises InflatedTooLarge before it reads more. Raises CompressionError for a truncated or damaged frame, for bytes
    after the frame's end, and for a frame that does not state its size.
    """
    if not frame.startswith(_MAGIC):  # zstd would take a skippable frame for an empty one.
        raise CompressionError("not_zstd", "not a zstd frame: it does not start with 28 B5 2F FD")
    try:
        # The buffer has the stated size. If that size is wrong, zstd raises an error before it overruns the buffer.
        if zstandard.frame_content_size(frame) > limit:
            raise InflatedTooLarge(limit)
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CompressionError("zstd_frame_damaged", f"not one whole zstd frame: {error}") from error
