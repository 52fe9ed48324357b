"""Gzipped requests, whole and damaged."""

from __future__ import annotations

import gzip
import os

import pytest

from gristmill import ApiError
from gristmill_api.http.content_coding import InvalidGzip, gunzip

LIMIT = 1_000_000


async def gunzipped(body: bytes, limit: int, reserved: list[int] | None = None) -> bytes:
    sizes: list[int] = []
    found = await gunzip(body, limit, sizes.append)
    if reserved is not None:
        reserved += sizes
    return found


@pytest.mark.parametrize("size", [0, 1, 1000, 300_000])
async def test_gunzip_returns_the_compressed_bytes(size: int) -> None:
    body = os.urandom(size)
    assert await gunzipped(gzip.compress(body), LIMIT) == body


async def test_gunzip_reads_several_members_padding_and_an_empty_body() -> None:
    assert await gunzipped(gzip.compress(b"one ") + gzip.compress(b"two") + b"\0\0", LIMIT) == b"one two"
    assert await gunzipped(b"", LIMIT) == b""
    assert await gunzipped(gzip.compress(b"a") * 64, LIMIT) == b"a" * 64


async def test_gunzip_refuses_many_members_which_take_quadratic_time() -> None:
    with pytest.raises(InvalidGzip):
        await gunzipped(gzip.compress(b"") * 65, LIMIT)


@pytest.mark.parametrize("cut", [1, 8, 9, 20, 150_000])
async def test_gunzip_refuses_a_body_that_ends_in_the_middle(cut: int) -> None:
    with pytest.raises(InvalidGzip):
        await gunzipped(gzip.compress(os.urandom(200_000))[:-cut], LIMIT)


@pytest.mark.parametrize("body", [b"plain text", b"\x1f\x8b", gzip.compress(b"one", mtime=0) + b"more", b"\0"])
async def test_gunzip_refuses_a_body_that_is_not_gzip(body: bytes) -> None:
    with pytest.raises(InvalidGzip):
        await gunzipped(body, LIMIT)


async def test_gunzip_refuses_a_wrong_checksum() -> None:
    body = bytearray(gzip.compress(b"some text"))
    body[-6] ^= 1
    with pytest.raises(InvalidGzip):
        await gunzipped(bytes(body), LIMIT)


async def test_gunzip_keeps_its_limit_to_the_byte() -> None:
    assert len(await gunzipped(gzip.compress(b" " * LIMIT), LIMIT)) == LIMIT
    halves = gzip.compress(b" " * (LIMIT // 2)) + gzip.compress(b" " * (LIMIT // 2 + 1))
    for body in (gzip.compress(b" " * (LIMIT + 1)), halves):
        with pytest.raises(ApiError) as refused:
            await gunzipped(body, LIMIT)
        assert refused.value.status == 413


@pytest.mark.parametrize("body", [b"one", b" " * 300_000, os.urandom(300_000), b" " * LIMIT], ids=len)
async def test_gunzip_reserves_bytes_before_it_makes_them(body: bytes) -> None:
    reserved: list[int] = []
    assert await gunzipped(gzip.compress(body), LIMIT, reserved) == body
    *before, after = reserved
    assert len(body) <= before[-1] <= LIMIT
    assert after == len(body)
