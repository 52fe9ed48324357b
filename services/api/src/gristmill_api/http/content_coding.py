"""gzip of request and response bodies, for Atropos' JSON. Groups of /v1 travel as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from isal import igzip_lib, isal_zlib
from starlette.requests import Request
from starlette.responses import Response

from gristmill_api import errors
from gristmill_api.http.body_limit import MOST_LISTS, UNCOUNTED, lists, offload

GZIP_MINIMUM_SIZE: Final = 1000
"""Bytes. A shorter response is not compressed."""
_GZIP_LEVEL: Final = 1
_GZIP: Final = 16 + isal_zlib.MAX_WBITS
_GZIP_ERROR: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]  # its stub says an instance
_MOST_MEMBERS: Final = 64
"""Each member copies the rest of the body, so many small ones would take quadratic time."""
_USUAL_GROWTH: Final = 4
"""A body that grows by more than this factor is inflated a second time, with room for the largest body."""


class InvalidGzip(ValueError):
    """The body is not gzip, or is cut short."""


async def gunzip(body: bytes, limit: int, reserve: Callable[[int], None]) -> bytes:
    """Returns the inflated body of a request with Content-Encoding gzip.

    `reserve` is called with the bytes that the body may inflate to, before they are made, and then with the real size.
    Raises InvalidGzip, ApiProblem (413) beyond `limit` bytes or MOST_LISTS, and the errors of `reserve`.
    """
    usual = min(limit, max(UNCOUNTED, _USUAL_GROWTH * len(body)))
    reserve(usual)
    inflated = await offload(usual, _gunzip, body, usual)
    if inflated is None and usual < limit:
        reserve(limit)
        inflated = await offload(limit, _gunzip, body, limit)
    if inflated is None:
        raise errors.too_large(limit)
    reserve(len(inflated))
    return inflated


def _gunzip(body: bytes, limit: int) -> bytes | None:
    """Returns None if the inflated body is larger than `limit`."""
    parts: list[bytes] = []
    room = limit + 1
    # A gzip file is one member or several. Zero bytes after them are padding. An empty body is an empty body.
    while body:
        if len(parts) == _MOST_MEMBERS:
            raise InvalidGzip(f"the body has more than {_MOST_MEMBERS} members")
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
    inflated = b"".join(parts)
    if lists(inflated) > MOST_LISTS:
        raise errors.too_many_lists(MOST_LISTS)
    return inflated


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
