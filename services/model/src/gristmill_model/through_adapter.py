"""Routes requests for the model through its adapter. vLLM loads this class by `--middleware`.

vLLM serves an adapter under a separate name. In Gristmill the model's name always means the trained model, with or
without adapters. Environments, including Atropos environments, and curl commands therefore work unchanged.
"""

from __future__ import annotations

import json
import os
from typing import Final

from gristmill_model import adapters
from gristmill_model.asgi import App, Receive, Scope, Send, read_body, with_body
from gristmill_model.settings import Settings

PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/inference/v1/generate"})


class ThroughAdapter:
    """ASGI middleware that puts the adapter's name into requests for the model.

    It passes a request for another model on unchanged, and vLLM refuses the request.
    """

    def __init__(self, app: App, model: str | None = None) -> None:
        """`model`, the served name, is for tests. vLLM passes only `app`, and the name comes from MODEL."""
        self._app = app
        self._model = model or Settings.read(os.environ, cuda_available=False).model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS:
            scope, receive = with_body(scope, receive, self._led(await read_body(receive)))
        await self._app(scope, receive, send)

    def _led(self, body: bytes) -> bytes:
        """Returns the body with the adapter's name. An invalid body stays unchanged, and vLLM refuses it."""
        try:
            asked = json.loads(body)
        except ValueError:
            return body
        if not isinstance(asked, dict) or asked.get("model") not in (None, self._model):
            return body
        return json.dumps({**asked, "model": adapters.NAME}).encode()
