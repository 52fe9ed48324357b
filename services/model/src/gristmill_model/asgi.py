"""Helpers for middlewares that read, rewrite or refuse a request."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LENGTHS: Final = frozenset({b"content-length", b"transfer-encoding"})


async def read_body(receive: Receive) -> bytes:
    """Returns the whole body of a request."""
    body = bytearray()
    while True:
        message = await receive()
        body.extend(message.get("body", b""))
        if not message.get("more_body"):
            return bytes(body)


def read_json(body: bytes) -> Any:
    """Returns the value of a JSON text. Returns None if the text is not JSON or is nested too deeply to be read."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    """Returns the same request with `body`. After the body, `receive` still reports whether the client is connected."""
    sent = False

    async def ask() -> MutableMapping[str, Any]:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return {**scope, "headers": sized(scope["headers"], body)}, ask


def sized(headers: list[tuple[bytes, bytes]], body: bytes) -> list[tuple[bytes, bytes]]:
    """Returns `headers` with the length of `body`."""
    others = [(name, value) for name, value in headers if name.lower() not in _LENGTHS]
    return [*others, (b"content-length", str(len(body)).encode())]


async def send_json(send: Send, status: int, body: object, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Sends a response with `body` as JSON. `headers` are sent in addition to the content's type and length."""
    content = json.dumps(body).encode()
    own = sized([(b"content-type", b"application/json"), *(headers or [])], content)
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": content})


@dataclass(frozen=True)
class Refusal:
    """The reason why a request is not served, in the form of the trajectory API's errors."""

    status: int
    code: str
    """The stable code of the reason, which clients rely on."""
    message: str
    remedy: str = ""

    async def send(self, send: Send) -> None:
        """Sends the refusal as the response."""
        challenge = [(b"www-authenticate", b"Bearer")] if self.status == 401 else []
        body = {"error": {"code": self.code, "message": self.message, "remedy": self.remedy}}
        await send_json(send, self.status, body, challenge)
