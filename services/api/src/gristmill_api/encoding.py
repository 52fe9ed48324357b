"""Content-Encoding of groups: plain or zstd, in both directions. A group is stored as it came."""

from __future__ import annotations

from starlette.datastructures import Headers

from gristmill import compression
from gristmill.compression import CompressionError, InflatedTooLarge
from gristmill_api import errors
from gristmill_api.offload import offload

ZSTD = "zstd"


def plain(group_id: str, body: bytes, headers: Headers, limit: int) -> bytes:
    """The bytes of a submitted group, inflated as its headers say, to `limit` bytes at most.

    Raises Refused: 415 another encoding, 413 too large, 400 damaged or not what the headers say.
    """
    encoding = ", ".join(headers.getlist("content-encoding")).strip().lower() or "identity"
    if encoding == "identity":
        if compression.is_compressed(body):
            raise errors.bad_group(group_id, "it is a zstd frame, which Content-Encoding: zstd must say")
        return body
    if encoding != ZSTD:
        raise errors.content_encoding(encoding)
    try:
        return compression.inflate(body, limit)
    except InflatedTooLarge as error:
        raise errors.too_large(limit) from error
    except CompressionError as error:
        raise errors.bad_group(group_id, str(error)) from error


async def negotiated(stored: bytes, headers: Headers, limit: int) -> tuple[bytes, dict[str, str]]:
    """A stored group as a client with these headers reads it, and the headers that go with it."""
    if not compression.is_compressed(stored):
        return stored, {}
    if accepts_zstd(headers):
        return stored, {"Content-Encoding": ZSTD, "Vary": "Accept-Encoding"}
    body = await offload(plain_size(stored, limit), compression.inflate, stored, limit)
    return body, {"Vary": "Accept-Encoding"}


def inflated_size(body: bytes, limit: int) -> int:
    """Bytes that inflating a group makes, at most `limit`, which is also the answer for a frame that does not report
    its size. 0 for a group that is not compressed, and for one that cannot be inflated to `limit` bytes."""
    if not compression.is_compressed(body):
        return 0
    try:
        size = compression.content_size(body)
    except CompressionError:
        return 0
    if size is None:
        return limit
    return size if size <= limit else 0


def plain_size(body: bytes, limit: int) -> int:
    """Bytes of a group when it is inflated; as inflated_size if it is compressed."""
    return inflated_size(body, limit) or len(body)


def accepts_zstd(headers: Headers) -> bool:
    """Whether Accept-Encoding names zstd, or anything, without refusing it (q=0)."""
    weights: dict[str, bool] = {}
    for item in ",".join(headers.getlist("accept-encoding")).lower().split(","):
        name, _, parameters = item.partition(";")
        weight = parameters.replace(" ", "").removeprefix("q=")
        weights[name.strip()] = weight.strip("0.") != "" or weight == ""
    return weights.get(ZSTD, weights.get("*", False))
