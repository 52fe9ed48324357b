"""Requests that come gzipped."""

from __future__ import annotations

from isal import igzip_lib, isal_zlib

from gristmill_api import errors
from gristmill_api.offload import offload

_BAD: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]  # its stub says an instance
_GZIP = 16 + isal_zlib.MAX_WBITS


class InvalidGzip(ValueError):
    """Not gzip, or cut short."""


async def inflated(body: bytes, limit: int) -> bytes:
    """The body of a request with Content-Encoding gzip. Raises InvalidGzip, and Refused (413) beyond `limit` bytes."""
    return await offload(len(body), _inflate, body, limit)


def _inflate(body: bytes, limit: int) -> bytes:
    parts: list[bytes] = []
    room = limit + 1
    # A gzip file is one member or several; zero bytes after them are padding. An empty body is an empty body.
    while body:
        member = isal_zlib.decompressobj(wbits=_GZIP)
        try:
            part = member.decompress(body, room)
        except _BAD as error:
            raise InvalidGzip(str(error)) from error
        parts.append(part)
        room -= len(part)
        if room <= 0:
            raise errors.too_large(limit)
        if not member.eof:
            raise InvalidGzip("the body ends in the middle")
        body = member.unused_data.lstrip(b"\0")
    return b"".join(parts)
