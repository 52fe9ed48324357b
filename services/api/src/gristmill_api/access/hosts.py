"""The middleware that refuses requests for hosts that the API does not answer for."""

from __future__ import annotations

import logging
from collections.abc import Collection

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gristmill.hosts import AllowedHosts
from gristmill.logs import line
from gristmill_api import errors
from gristmill_api.paths import route_path

_LOG = logging.getLogger(__name__)


class HostCheck:
    """Answers 421 `host_not_allowed`. It is outside everything that answers requests, so that no path escapes it.

    WebSockets need no check: the Guard refuses all of them.
    """

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, atropos_paths: Collection[str]) -> None:
        """`atropos_paths`: the paths at which errors have the shape that Atropos' clients know."""
        self._app = app
        self._hosts = hosts
        self._atropos_paths = atropos_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = self._hosts.refused(scope["headers"]) if scope["type"] == "http" else None
        if host is None:
            await self._app(scope, receive, send)
            return
        refused = errors.host_not_allowed(host)
        request = f"{scope['method']} {scope['path']}"
        _LOG.warning(line("refused", request=request, code=refused.code, why=refused.message))
        body = refused.detail() if route_path(scope) in self._atropos_paths else refused.body()
        await JSONResponse(body, refused.status)(scope, receive, send)
