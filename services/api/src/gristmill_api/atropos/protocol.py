"""The route class of Atropos' protocol: gzip in both directions, and errors in the shape that its clients read."""

from __future__ import annotations

import functools

from fastapi import Request, Response

from gristmill_api.http.body_limit import reserve_inflated
from gristmill_api.http.content_coding import gunzip, gzip_response
from gristmill_api.http.error_handlers import ErrorFormat
from gristmill_api.http.fast_route import FastRoute, Handler


class AtroposRoute(FastRoute):
    """A route at the API's root."""

    error_format = ErrorFormat.ATROPOS

    def wrap(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            return await gzip_response(request, await handler(await _inflated(request)))

        return handle


class _InflatedRequest(Request):
    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body


async def _inflated(request: Request) -> Request:
    if "gzip" not in request.headers.get("content-encoding", "").lower():
        return request
    limit = request.app.state.context.limits.max_body_bytes
    reserve = functools.partial(reserve_inflated, request.scope)
    return _InflatedRequest(request, await gunzip(await request.body(), limit, reserve))
