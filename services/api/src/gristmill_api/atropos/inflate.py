"""Requests that come gzipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from isal import igzip_lib, isal_zlib

from gristmill_api import errors
from gristmill_api.offload import IN_LOOP, offload

_BAD: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]  # its stub says an instance
_GZIP = 16 + isal_zlib.MAX_WBITS
_USUAL: Final = 4
"""Times that a body grows. A body that grows more is inflated a second time, with room for the largest."""


class InvalidGzip(ValueError):
    """Not gzip, or cut short."""


async def inflated(body: bytes, limit: int, reserve: Callable[[int], None]) -> bytes:
    """The body of a request with Content-Encoding gzip. `reserve` is called with the bytes that it may inflate to,
    before they are made, and then with its real size.

    Raises InvalidGzip, Refused (413) beyond `limit` bytes, and the errors of `reserve`.
    """
    usual = min(limit, max(IN_LOOP, _USUAL * len(body)))
    reserve(usual)
    found = await offload(usual, _inflate, body, usual)
    if found is None and usual < limit:
        reserve(limit)
        found = await offload(limit, _inflate, body, limit)
    if found is None:
        raise errors.too_large(limit)
    reserve(len(found))
    return found


def _inflate(body: bytes, limit: int) -> bytes | None:
    """None: it is larger than `limit`."""
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
            return None
        if not member.eof:
            raise InvalidGzip("the body ends in the middle")
        body = member.unused_data.lstrip(b"\0")
    return b"".join(parts)
