"""Answers that go gzipped: those of 1000 bytes or more, where the client takes it."""

from __future__ import annotations

from typing import Final

from isal import isal_zlib
from starlette.requests import Request
from starlette.responses import Response

from gristmill_api.offload import offload

MINIMUM_SIZE: Final = 1000
_GZIP: Final = 16 + isal_zlib.MAX_WBITS
_LEVEL: Final = 1


def accepted(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


class Deflater:
    """A gzip stream. Each piece is deflated off the event loop when it is large."""

    def __init__(self) -> None:
        self._stream = isal_zlib.compressobj(_LEVEL, wbits=_GZIP)

    async def add(self, piece: bytes) -> bytes:
        return await offload(len(piece), self._stream.compress, piece)

    def end(self) -> bytes:
        return self._stream.flush()


async def deflate(request: Request, response: Response) -> Response:
    """The answer as the client gets it. One that streams deflates itself."""
    body = getattr(response, "body", b"")
    if not accepted(request) or len(body) < MINIMUM_SIZE or "content-encoding" in response.headers:
        return response
    deflater = Deflater()
    response.body = await deflater.add(body) + deflater.end()
    response.headers["Content-Encoding"] = "gzip"
    response.headers["Content-Length"] = str(len(response.body))
    response.headers.add_vary_header("Accept-Encoding")
    return response
