"""The middleware that lets requests pass, or not, before anything of their body is read."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gristmill.logs import line
from gristmill_api import errors
from gristmill_api.access.origins import from_another_site
from gristmill_api.access.table import needed
from gristmill_api.access.tokens import Tokens
from gristmill_api.errors import Refused
from gristmill_api.paths import route_path

_LOG = logging.getLogger(__name__)
_CHALLENGE: Final = 'Bearer realm="gristmill", Basic realm="gristmill"'


class Guard:
    """Answers 401 without a token that is known, 403 with one of the wrong role or for a page of another site.

    Without `tokens` (API_AUTH=none) only the last is asked.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens | None, origins: Collection[str]) -> None:
        self._app = app
        self._tokens = tokens
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # the API has none; so none can slip in unguarded
            await send({"type": "websocket.close", "code": 1008, "reason": "not open here"})
            return
        refused = self._refusal(scope) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
            return
        request = f"{scope['method']} {scope['path']}"
        _LOG.warning(line("refused", request=request, code=refused.code, why=refused.message))
        headers = {"WWW-Authenticate": _CHALLENGE} if refused.status == 401 else None
        await JSONResponse(refused.body(), refused.status, headers)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refused | None:
        path = route_path(scope)
        request = f"{scope['method']} {path}"
        need = needed(scope["method"], path)
        headers = Headers(scope=scope)
        if not need.reads and from_another_site(headers, self._origins):
            return errors.cross_site(request, headers.get("origin"))
        if self._tokens is None or not need.roles:
            return None
        role = self._tokens.role_of(headers.get("authorization", ""))
        if role is None:
            return errors.unauthorized(request, need.value, "authorization" in headers)
        scope["role"] = role
        return None if role in need.roles else errors.forbidden(request, need.value, role)
