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
    """Returns a frame without its content size, as from a client that compresses while it sends."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    return compressor.compress(content) + compressor.flush()


def bomb(mib: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    return b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(mib)), compressor.flush()])


@pytest.mark.slow
@pytest.mark.parametrize("compress", [deflate, streamed])
@given(content=st.binary(max_size=3000))
def test_inflate_reads_whole_frames(compress: object, content: bytes) -> None:
    assert callable(compress)
    assert inflate(compress(content), LIMIT) == content


@pytest.mark.parametrize("compress", [deflate, streamed])
def test_inflate_limit_is_exact(compress: object) -> None:
    assert callable(compress)
    content = make_group(lengths=[(300, 300)] * 8).encode()
    assert inflate(compress(content), len(content)) == content
    with pytest.raises(InflatedTooLarge):
        inflate(compress(content), len(content) - 1)


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.slow
def test_zstd_bomb_is_refused_before_it_takes_memory(sized: bool) -> None:
    frame = deflate(bytes(256 << 20)) if sized else bomb(256)
    assert len(frame) < 32 << 10
    tracemalloc.start()
    try:
        with pytest.raises(InflatedTooLarge):
            inflate(frame, LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 2 * LIMIT
    finally:
        tracemalloc.stop()


def test_frame_with_a_false_size_is_refused() -> None:
    frame = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(range(256)) * 40))
    at = frame.index((10240 - 256).to_bytes(2, "little"), 4)
    frame[at : at + 2] = (1000 - 256).to_bytes(2, "little")
    with pytest.raises(CompressionError):
        inflate(bytes(frame), LIMIT)


@pytest.mark.parametrize("compress", [deflate, streamed])
@given(cut=st.integers(min_value=0, max_value=10_000))
def test_a_truncated_frame_is_refused(compress: object, cut: int) -> None:
    assert callable(compress)
    frame: bytes = compress(make_group(lengths=[(30, 30)] * 4).encode())
    with pytest.raises(CompressionError):
        inflate(frame[: cut % len(frame)], LIMIT)


@pytest.mark.parametrize("compress", [deflate, streamed])
@pytest.mark.parametrize("rest", [b"x", b"\0\0\0\0\0", deflate(b"another frame"), b"\x50\x2a\x4d\x18\0\0\0\0"])
def test_bytes_after_the_frame_are_refused(compress: object, rest: bytes) -> None:
    assert callable(compress)
    with pytest.raises(CompressionError):
        inflate(compress(make_group().encode()) + rest, LIMIT)


@pytest.mark.parametrize("body", [b"", b"\x28\xb5\x2f", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18\0\0\0\0", b"{}"])
def test_body_that_is_not_a_frame_is_refused(body: bytes) -> None:
    with pytest.raises(CompressionError):
        inflate(body, LIMIT)


@pytest.mark.slow
@given(data=st.data())
def test_a_damaged_frame_is_refused_or_read_within_the_limit(data: st.DataObject) -> None:
    frame = bytearray(data.draw(st.sampled_from([deflate, streamed]))(make_group(lengths=[(20, 20)] * 3).encode()))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CompressionError, InflatedTooLarge):
        assert len(inflate(bytes(frame), LIMIT)) <= LIMIT
