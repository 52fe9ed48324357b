"""zstd frames from unknown senders: whole frames are read, everything else is refused, and no bomb exhausts the
memory."""

from __future__ import annotations

import contextlib
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.support.groups import make_group

from gristmill.internal.compression import CompressionError, InflatedTooLarge, deflate, inflate

LIMIT = 1 << 20


def streamed(content: bytes) -> bytes:
    """Returns a frame without its content size, which the archive never has."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    return compressor.compress(content) + compressor.flush()


@pytest.mark.slow
@given(content=st.binary(max_size=3000))
def test_inflate_reads_whole_frames(content: bytes) -> None:
    assert inflate(deflate(content), LIMIT) == content


def test_inflate_limit_is_exact() -> None:
    content = make_group(lengths=[(300, 300)] * 8).encode()
    assert inflate(deflate(content), len(content)) == content
    with pytest.raises(InflatedTooLarge):
        inflate(deflate(content), len(content) - 1)


@pytest.mark.slow
def test_zstd_bomb_is_refused_before_it_takes_memory() -> None:
    frame = deflate(bytes(256 << 20))
    assert len(frame) < 32 << 10
    tracemalloc.start()
    try:
        with pytest.raises(InflatedTooLarge):
            inflate(frame, LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 2 * LIMIT
    finally:
        tracemalloc.stop()


def test_frame_without_its_size_is_refused() -> None:
    with pytest.raises(CompressionError):
        inflate(streamed(b"content"), LIMIT)


def test_frame_with_a_false_size_is_refused() -> None:
    frame = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(range(256)) * 40))
    at = frame.index((10240 - 256).to_bytes(2, "little"), 4)
    frame[at : at + 2] = (1000 - 256).to_bytes(2, "little")
    with pytest.raises(CompressionError):
        inflate(bytes(frame), LIMIT)


@given(cut=st.integers(min_value=0, max_value=10_000))
def test_a_truncated_frame_is_refused(cut: int) -> None:
    frame = deflate(make_group(lengths=[(30, 30)] * 4).encode())
    with pytest.raises(CompressionError):
        inflate(frame[: cut % len(frame)], LIMIT)


@pytest.mark.parametrize("rest", [b"x", b"\0\0\0\0\0", deflate(b"another frame"), b"\x50\x2a\x4d\x18\0\0\0\0"])
def test_bytes_after_the_frame_are_refused(rest: bytes) -> None:
    with pytest.raises(CompressionError):
        inflate(deflate(make_group().encode()) + rest, LIMIT)


@pytest.mark.parametrize("body", [b"", b"\x28\xb5\x2f", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18\0\0\0\0", b"{}"])
def test_body_that_is_not_a_frame_is_refused(body: bytes) -> None:
    with pytest.raises(CompressionError):
        inflate(body, LIMIT)


@pytest.mark.slow
@given(data=st.data())
def test_a_damaged_frame_is_refused_or_read_within_the_limit(data: st.DataObject) -> None:
    frame = bytearray(deflate(make_group(lengths=[(20, 20)] * 3).encode()))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CompressionError, InflatedTooLarge):
        assert len(inflate(bytes(frame), LIMIT)) <= LIMIT
