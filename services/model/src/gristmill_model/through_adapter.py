"""Leads requests for the model through its adapter: vLLM loads this class by `--middleware`.

vLLM serves an adapter under a name of its own. Here the model's name means the model as it is trained, with adapters as
without: environments, Atropos' ones too, and everybody's curl go on as they are.
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
    """ASGI middleware. A request that names another model is passed on as it is, for vLLM to refuse."""

    def __init__(self, app: App, model: str | None = None) -> None:
        """`model`, the served name, is for tests; vLLM gives only `app`, and MODEL names it."""
        self._app = app
        self._model = model or Settings.read(os.environ, cuda_available=False).model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS:
            scope, receive = with_body(scope, receive, self._led(await read_body(receive)))
        await self._app(scope, receive, send)

    def _led(self, body: bytes) -> bytes:
        """What is no JSON object is left to vLLM to refuse."""
        try:
            asked = json.loads(body)
        except ValueError:
            return body
        if not isinstance(asked, dict) or asked.get("model") not in (None, self._model):
            return body
        return json.dumps({**asked, "model": adapters.NAME}).encode()
