"""Keeps vLLM's developer endpoints for the trainer: vLLM loads this class by `--middleware`.

A request for a host that the server does not answer for is refused first (gristmill.hosts).

Every client that reaches the port may generate and read. Every other endpoint (publish, pause, sleep, and any that the
next vLLM adds) takes the trainer's token. The token is a file in the weights volume: a service that may write weights
there may also make the server load them. A trainer that takes a run writes a new token, and so shuts out the trainer
before it.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from gristmill import Deployment, hosts
from gristmill.hosts import AllowedHosts
from gristmill_model import publication
from gristmill_model.asgi import App, Receive, Refusal, Scope, Send
from gristmill_model.publication import FIRST_WEIGHTS, Publications

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
_REMEMBERED = 100
"""Earlier tokens, so that their owners are told what happened."""
# An environment finds out by a GET whether the server has a route: the status is 405 if it has, and 404 if it lacks it.
OPEN = frozenset({*(("GET", path) for path in READING | GENERATING), *(("POST", path) for path in GENERATING)})


class DeveloperGate:
    """ASGI middleware: passes an allowlist of (method, path), and anything that carries the token."""

    def __init__(self, app: App, token_file: Path | None = None) -> None:
        """`token_file` is for tests; vLLM gives only `app`, and the file is in GRISTMILL_WEIGHTS_DIR."""
        self._app = app
        self._hosts = AllowedHosts.read(os.environ)
        self._publications = Publications(app, Path(os.environ.get(FIRST_WEIGHTS, "")))
        self._token_file = token_file or Deployment.read(os.environ).weights_dir / "token"
        self._current = b""
        self._replaced: list[bytes] = []
        """Earlier contents of the file, the newest last. Their owners were trainers of this server."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":  # none of ours; refused before it is accepted
            await send({"type": "websocket.close", "code": 1008, "reason": "not open here"})
            return
        host = self._hosts.refused(scope["headers"])
        if host is not None:
            await Refusal(hosts.STATUS, hosts.CODE, hosts.message(host), hosts.REMEDY).send(send)
            return
        request = (scope["method"], scope["path"])
        refusal = None if request in OPEN else self._refusal(scope)
        if refusal is not None:
            await refusal.send(send)
        elif request == ("POST", publication.PATH):
            await self._publications(scope, receive, send, lambda: self._refusal(scope))
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        """Why the request may not pass; None if it may."""
        what = f"{scope['method']} {scope['path']} is for the trainer only"
        try:
            # Read at each request: each trainer replaces the token of the one before.
            token = self._token_file.read_bytes().strip()
        except OSError as error:
            problem = f"no token can be read at {self._token_file} ({type(error).__name__}); the trainer makes it"
            return Refusal(401, "unauthorized", f"{what}: {problem}")
        if not token:
            return Refusal(401, "unauthorized", f"{what}: the token file {self._token_file} is empty")
        if token != self._current:
            earlier = [old for old in (*self._replaced, self._current) if old not in (token, b"")]
            self._current, self._replaced = token, earlier[-_REMEMBERED:]
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, b"Bearer " + token):
            return None
        # Every comparison takes the same time, whichever token it was.
        if sum(hmac.compare_digest(given, b"Bearer " + old) for old in self._replaced):
            return Refusal(409, "fenced", f"{what}, and another trainer has replaced the one that sent it")
        problem = f"send 'Authorization: Bearer TOKEN' with the content of {self._token_file}"
        return Refusal(401, "unauthorized", f"{what}: {problem}")
