"""Routes that FastAPI documents but does not stand in front of.

Its dependency tree, exit stacks and conversions cost a request more than Redis takes to store a small group. So the
routes that every group passes read their parameters themselves, once per request and with the same types, and are
found before its router.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, get_type_hints
from urllib.parse import parse_qsl

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gristmill_api.paths import route_path

Endpoint = Callable[..., Awaitable[Response]]


class Front:
    """ASGI middleware, the innermost: runs the route that fits, or goes on to FastAPI."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route], handlers: Mapping[Any, Any]) -> None:
        """`handlers`: those of the FastAPI app, by exception."""
        self._app = app
        self._routes = [(route.methods or set(), route.path_regex.fullmatch, route) for route in routes]
        expected = {kind: handler for kind, handler in handlers.items() if kind is not Exception}
        self._run = ExceptionMiddleware(_run, handlers=expected)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = route_path(scope)
            for methods, matches, route in self._routes:
                match = matches(path)
                if match and scope["method"] in methods:
                    scope.update(route=route, endpoint=route.endpoint, path_params=match.groupdict())
                    await self._run(scope, receive, send)
                    return
        await self._app(scope, receive, send)


async def _run(scope: Scope, receive: Receive, send: Send) -> None:
    await scope["route"].app(scope, receive, send)


class Direct(APIRoute):
    """For endpoints that return a Response and take nothing but `ctx`, `request`, strings of the path or the query,
    and a model of a JSON body.

    Put the routes into the application as they are: a router that is included wraps its routes in new ones.
    """

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        hints = get_type_hints(endpoint, include_extras=True)

        def adapters(fields: Any) -> Any:
            return [(field.name, TypeAdapter(hints[field.name]).validator) for field in fields]

        in_path: Final = adapters(self.dependant.path_params)
        in_query: Final = adapters(self.dependant.query_params)
        in_body: Final = adapters(self.dependant.body_params)

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive, send)
            given: dict[str, Any] = {"ctx": request.app.state.context, "request": request}
            for name, adapter in in_path:
                given[name] = _checked(adapter.validate_python, scope["path_params"].get(name), "path", name)
            query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)) if in_query else {}
            for name, adapter in in_query:
                given[name] = _checked(adapter.validate_python, query.get(name), "query", name)
            for name, adapter in in_body:
                given[name] = _checked(adapter.validate_json, await _json(request), "body")
            response = await endpoint(**given)
            await response(scope, receive, send)

        self.app = run


async def _json(request: Request) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        problem = {"loc": ("header", "content-type"), "msg": f"it is {media_type or 'unset'}, not application/json"}
        raise RequestValidationError([problem])
    return await request.body()


def _checked(validate: Callable[[Any], Any], value: str | bytes | None, *where: str) -> Any:
    try:
        return validate(value)
    except ValidationError as error:
        raise RequestValidationError([{**told, "loc": (*where, *told["loc"])} for told in error.errors()]) from error
