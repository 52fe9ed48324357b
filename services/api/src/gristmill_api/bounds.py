"""ASGI middleware that bounds request bodies while they stream in, whatever their headers claim.

Starlette has one too; it replaces the answer by plain text, and every error of this API is JSON.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill_api import errors


class BodyLimit:
    """Raises Refused (413) from `receive` once a body is, or says it is, over `limit` bytes."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        too_long = not announced.isdecimal() or int(announced) > self._limit
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if too_long or received > self._limit:
                    raise errors.too_large(self._limit)
            return message

        await self._app(scope, bounded, send)
