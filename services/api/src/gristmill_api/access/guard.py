"""The middlewares that refuse requests before they read any of the body.

A page of any site may make a browser send requests to 127.0.0.1, with the password that the browser remembers. Without
CORS the page cannot read the response, but a POST, or Atropos' GET /reset_data, would have had its effect. So a request
that changes something is refused if the browser reports that another site's page sent it. API_CORS_ORIGINS names
exceptions.

Towards plain http on another machine, browsers send neither Sec-Fetch-Site nor, with a GET, Origin. Then a GET that
changes something is refused if it looks like a browser's request, unless its Referer is a page of the API. Programs
other than browsers send none of these headers and are not affected.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gristmill.internal.hosts import AllowedHosts
from gristmill_api import errors
from gristmill_api.access.permissions import needed
from gristmill_api.access.settings import Tokens
from gristmill_api.errors import ApiProblem
from gristmill_api.http.error_handlers import ErrorFormat, log_problem, problem_response
from gristmill_api.http.fast_route import route_path

_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="gristmill", Basic realm="gristmill"'}


class HostCheck:
    """Answers 421 `host_not_allowed`. It is outside everything that answers requests, so every path is checked.

    WebSockets need no check: the Guard refuses all of them.
    """

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, atropos_paths: Collection[str]) -> None:
        """`atropos_paths`: the paths at which errors have the shape that Atropos' clients read."""
        self._app = app
        self._hosts = hosts
        self._atropos_paths = atropos_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = self._hosts.refused(scope["headers"]) if scope["type"] == "http" else None
        if host is None:
            await self._app(scope, receive, send)
            return
        problem = errors.host_not_allowed(host)
        log_problem(f"{scope['method']} {scope['path']}", problem)
        at_root = route_path(scope) in self._atropos_paths
        response = problem_response(problem, ErrorFormat.ATROPOS if at_root else ErrorFormat.NATIVE)
        await response(scope, receive, send)


class Guard:
    """Answers 401 without a known token, and 403 for a token of the wrong role or a page of another site.

    Without `tokens` (API_AUTH=none) only pages of other sites are refused.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens | None, origins: Collection[str]) -> None:
        self._app = app
        self._tokens = tokens
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # The API has no WebSockets. No later route can add one without a check.
            await send({"type": "websocket.close", "code": 1008, "reason": "not open here"})
            return
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        log_problem(f"{scope['method']} {scope['path']}", problem)
        headers = _CHALLENGE if problem.status == 401 else None
        await problem_response(problem, ErrorFormat.NATIVE, headers)(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiProblem | None:
        path = route_path(scope)
        request = f"{scope['method']} {path}"
        need = needed(scope["method"], path)
        headers = Headers(scope=scope)
        if not need.reads and from_another_site(scope["method"], headers, self._origins):
            return errors.cross_site(request, headers.get("origin"))
        if self._tokens is None or not need.roles:
            return None
        role = self._tokens.role_of(headers.get("authorization", ""))
        if role is None:
            return errors.unauthorized(request, need.value, "authorization" in headers)
        scope["role"] = role
        return None if role in need.roles else errors.forbidden(request, need.value, role)


def from_another_site(method: str, headers: Headers, allowed: Collection[str]) -> bool:
    """Returns True if a browser sent this for a page that is neither the API's own nor of an allowed origin."""
    origin = headers.get("origin")
    if origin in allowed:
        return False
    # The browser's own judgement. A browser omits it towards plain http on other machines; then the origin decides.
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("cross-site", "same-site")
    if origin is not None:
        return urlsplit(origin).netloc != headers.get("host")
    # With every other method a browser sends the origin.
    if method not in ("GET", "HEAD"):
        return False
    referer = urlsplit(headers.get("referer", ""))
    if referer.netloc:
        return referer.netloc != headers.get("host") and f"{referer.scheme}://{referer.netloc}" not in allowed
    return _is_of_a_browser(headers)


def _is_of_a_browser(headers: Headers) -> bool:
    """Whether a browser sent the request. A page can suppress Referer, and cannot replace the browser's name."""
    accepted = headers.get("accept", "").lower()
    return (
        headers.get("user-agent", "").lower().startswith(("mozilla/", "opera/"))
        or "upgrade-insecure-requests" in headers
        or any(kind in accepted for kind in ("text/html", "text/css", "image/", "audio/", "video/"))
    )
