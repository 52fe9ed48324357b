"""Keeps vLLM's developer endpoints for the trainer: vLLM loads this class by `--middleware`.

A request for a host that the server does not answer for is refused first (gristmill.hosts).

Every client that reaches the port may generate and read. Every other endpoint (pause, reload weights, sleep, and any
that the next vLLM adds) takes the trainer's token. The token is a file in the weights volume: a service that may write
weights there may also make the server load them.
"""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path

from gristmill import Deployment, hosts
from gristmill.hosts import AllowedHosts
from gristmill_model.asgi import App, Receive, Scope, Send

READING = frozenset({"/health", "/ping", "/version", "/metrics", "/load", "/v1/models", "/weight_info", "/is_paused"})
GENERATING = frozenset(
    {
        "/ping",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/inference/v1/generate",
        "/generate",
        "/tokenize",
        "/detokenize",
    }
)
OPEN = frozenset({*(("GET", path) for path in READING), *(("POST", path) for path in GENERATING)})


class DeveloperGate:
    """ASGI middleware: passes an allowlist of (method, path), and anything that carries the token."""

    def __init__(self, app: App, token_file: Path | None = None) -> None:
        """`token_file` is for tests; vLLM gives only `app`, and the file is in GRISTMILL_WEIGHTS_DIR."""
        self._app = app
        self._hosts = AllowedHosts.read(os.environ)
        self._token_file = token_file or Deployment.read(os.environ).weights_dir / "token"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":  # none of ours; refused before it is accepted
            await send({"type": "websocket.close", "code": 1008, "reason": "not open here"})
            return
        host = self._hosts.refused(scope["headers"])
        if host is not None:
            await _refuse(send, hosts.STATUS, hosts.CODE, hosts.message(host), hosts.REMEDY)
            return
        refusal = None if (scope["method"], scope["path"]) in OPEN else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            message = f"{scope['method']} {scope['path']} is for the trainer only: {refusal}"
            await _refuse(send, 401, "unauthorized", message)

    def _refusal(self, scope: Scope) -> str | None:
        """Why the request may not pass; None if it may."""
        try:
            # Read at each request: the trainer may make the token after the server started.
            token = self._token_file.read_bytes().strip()
        except OSError as error:
            return f"no token can be read at {self._token_file} ({type(error).__name__}); the trainer makes it"
        if not token:
            return f"the token file {self._token_file} is empty"
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, b"Bearer " + token):
            return None
        return f"send 'Authorization: Bearer TOKEN' with the content of {self._token_file}"


async def _refuse(send: Send, status: int, code: str, message: str, remedy: str = "") -> None:
    error = {"code": code, "message": message, "remedy": remedy}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *([(b"www-authenticate", b"Bearer")] if status == 401 else []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
