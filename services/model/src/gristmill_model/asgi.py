"""What middlewares need that read or rewrite a request's body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LENGTHS: Final = frozenset({b"content-length", b"transfer-encoding"})


async def read_body(receive: Receive) -> bytes:
    """The whole of it."""
    body = bytearray()
    while True:
        message = await receive()
        body.extend(message.get("body", b""))
        if not message.get("more_body"):
            return bytes(body)


def with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    """The same request with `body`; after it, `receive` still tells whether the client is there."""
    sent = False

    async def ask() -> MutableMapping[str, Any]:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return {**scope, "headers": sized(scope["headers"], body)}, ask


def sized(headers: list[tuple[bytes, bytes]], body: bytes) -> list[tuple[bytes, bytes]]:
    """`headers` for `body`."""
    kept = [(name, value) for name, value in headers if name.lower() not in _LENGTHS]
    return [*kept, (b"content-length", str(len(body)).encode())]
