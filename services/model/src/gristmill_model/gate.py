"""Reserves vLLM's developer endpoints for the trainer. vLLM loads this class by `--middleware`.

The gate first refuses a request for a host that the server does not answer for (gristmill.internal.hosts).

Every client that reaches the port may generate and read. Every other endpoint (publish, pause, sleep, and any endpoint
that the next vLLM adds) requires the trainer's token. The token is a file in the weights volume, so a service that may
write weights there may also make the server load them. A trainer that takes a run writes a new token, which shuts out
the previous trainer.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from gristmill import Deployment
from gristmill.internal import hosts
from gristmill.internal.hosts import AllowedHosts
from gristmill.internal.signals import stop_on_hangup
from gristmill_model import publication
from gristmill_model.asgi import App, Receive, Refusal, Scope, Send
from gristmill_model.publication import FIRST_WEIGHTS, Publications

READING = frozenset({"/health", "/ping", "/version", "/metrics", "/load", "/v1/models", "/weight_info", "/is_paused"})
GENERATING = frozenset(
    {
        "/ping",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/derender",  # parses token ids, up to the model's length
        "/v1/embeddings",
        "/inference/v1/generate",
        "/generate",
        "/tokenize",
        "/detokenize",
    }
)
_REMEMBERED = 100
"""Maximum number of earlier tokens that the gate keeps. Their owners receive the error code "fenced"."""
# An environment sends a GET to check whether the server has a route. The status is 405 if the route exists, else 404.
OPEN = frozenset({*(("GET", path) for path in READING | GENERATING), *(("POST", path) for path in GENERATING)})


class DeveloperGate:
    """ASGI middleware that passes an allowlist of (method, path), and every request that carries the token."""

    def __init__(self, app: App, token_file: Path | None = None) -> None:
        """`token_file` is for tests. vLLM passes only `app`; the token file is then in GRISTMILL_WEIGHTS_DIR."""
        stop_on_hangup()  # vLLM's server runs in this process, and handles SIGTERM only.
        self._app = app
        self._hosts = AllowedHosts.read(os.environ)
        self._publications = Publications(app, Path(os.environ.get(FIRST_WEIGHTS, "")))
        self._token_file = token_file or Deployment.read(os.environ).weights_dir / "token"
        self._current = b""
        self._replaced: list[bytes] = []
        """Earlier tokens of the file, the newest last. Their owners were trainers of this server."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":  # the server has no websockets, so it refuses them before it accepts
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
        elif scope["method"] == "POST" and scope["path"] in publication.PATHS:
            await self._publications(scope, receive, send, lambda: self._refusal(scope))
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        """Returns the reason why the request may not pass, or None if it may."""
        what = f"{scope['method']} {scope['path']} is for the trainer only"
        try:
            # The gate reads the file for each request, because each trainer replaces the previous trainer's token.
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
        # The check compares all earlier tokens, so its time does not depend on which token matches.
        if sum(hmac.compare_digest(given, b"Bearer " + old) for old in self._replaced):
            return Refusal(409, "fenced", f"{what}, and another trainer has replaced the one that sent it")
        problem = f"send 'Authorization: Bearer TOKEN' with the content of {self._token_file}"
        return Refusal(401, "unauthorized", f"{what}: {problem}")
