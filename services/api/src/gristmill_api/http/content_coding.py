"""Content-Encoding of request and response bodies: zstd for groups of /v1, gzip for Atropos' JSON.

A group of /v1 is stored as it arrived, plain or as one zstd frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from isal import igzip_lib, isal_zlib
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from gristmill import compression
from gristmill.compression import CompressionError, InflatedTooLarge
from gristmill_api import errors
from gristmill_api.http.body_limit import UNCOUNTED, offload

ZSTD: Final = "zstd"

GZIP_MINIMUM_SIZE: Final = 1000
"""Bytes. A shorter response is not compressed."""
_GZIP_LEVEL: Final = 1
_GZIP: Final = 16 + isal_zlib.MAX_WBITS
_GZIP_ERROR: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]  # its stub says an instance
_USUAL_GROWTH: Final = 4
"""A body that grows by more than this factor is inflated a second time, with room for the largest body."""


def inflate_group(group_id: str, body: bytes, headers: Headers, limit: int) -> bytes:
    """Returns the bytes of a submitted group, inflated as its headers say, to `limit` bytes at most.

    Raises ApiProblem: 415 another encoding, 413 too large, 400 damaged or not in the encoding that the headers name.
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


async def negotiated_group(stored: bytes, headers: Headers, limit: int) -> tuple[bytes, dict[str, str]]:
    """Returns a stored group in an encoding that a client with these headers accepts, and the response's headers."""
    if not compression.is_compressed(stored):
        return stored, {}
    if accepts_zstd(headers):
        return stored, {"Content-Encoding": ZSTD, "Vary": "Accept-Encoding"}
    body = await offload(plain_size(stored, limit), compression.inflate, stored, limit)
    return body, {"Vary": "Accept-Encoding"}


def inflated_size(body: bytes, limit: int) -> int:
    """Returns the bytes that inflating a group makes, at most `limit`.

    A frame that does not report its size counts as `limit`. A group that is not compressed, and one that cannot be
    inflated to `limit` bytes, count as 0.
    """
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
    """Returns the bytes of a group when it is inflated; as inflated_size if it is compressed."""
    return inflated_size(body, limit) or len(body)


def accepts_zstd(headers: Headers) -> bool:
    """Returns whether Accept-Encoding names zstd, or anything, without refusing it (q=0)."""
    weights: dict[str, bool] = {}
    for item in ",".join(headers.getlist("accept-encoding")).lower().split(","):
        name, _, parameters = item.partition(";")
        weight = parameters.replace(" ", "").removeprefix("q=")
        weights[name.strip()] = weight.strip("0.") != "" or weight == ""
    return weights.get(ZSTD, weights.get("*", False))


class InvalidGzip(ValueError):
    """The body is not gzip, or is cut short."""


async def gunzip(body: bytes, limit: int, reserve: Callable[[int], None]) -> bytes:
    """Returns the inflated body of a request with Content-Encoding gzip.

    `reserve` is called with the bytes that the body may inflate to, before they are made, and then with the real size.
    Raises InvalidGzip, ApiProblem (413) beyond `limit` bytes, and the errors of `reserve`.
    """
    usual = min(limit, max(UNCOUNTED, _USUAL_GROWTH * len(body)))
    reserve(usual)
    found = await offload(usual, _gunzip, body, usual)
    if found is None and usual < limit:
        reserve(limit)
        found = await offload(limit, _gunzip, body, limit)
    if found is None:
        raise errors.too_large(limit)
    reserve(len(found))
    return found


def _gunzip(body: bytes, limit: int) -> bytes | None:
    """Returns None if the inflated body is larger than `limit`."""
    parts: list[bytes] = []
    room = limit + 1
    # A gzip file is one member or several. Zero bytes after them are padding. An empty body is an empty body.
    while body:
        member = isal_zlib.decompressobj(wbits=_GZIP)
        try:
            part = member.decompress(body, room)
        except _GZIP_ERROR as error:
            raise InvalidGzip(str(error)) from error
        parts.append(part)
        room -= len(part)
        if room <= 0:
            return None
        if not member.eof:
            raise InvalidGzip("the body ends in the middle")
        body = member.unused_data.lstrip(b"\0")
    return b"".join(parts)


def accepts_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


class GzipStream:
    """A gzip stream. A large piece is compressed on a thread."""

    def __init__(self) -> None:
        self._stream = isal_zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP)

    async def add(self, piece: bytes) -> bytes:
        return await offload(len(piece), self._stream.compress, piece)

    def end(self) -> bytes:
        return self._stream.flush()


async def gzip_response(request: Request, response: Response) -> Response:
    """Compresses a response that is large enough, if the client accepts gzip. A stream compresses itself."""
    body = getattr(response, "body", b"")
    if not accepts_gzip(request) or len(body) < GZIP_MINIMUM_SIZE or "content-encoding" in response.headers:
        return response
    stream = GzipStream()
    response.body = await stream.add(body) + stream.end()
    response.headers["Content-Encoding"] = "gzip"
    response.headers["Content-Length"] = str(len(response.body))
    response.headers.add_vary_header("Accept-Encoding")
    return response
