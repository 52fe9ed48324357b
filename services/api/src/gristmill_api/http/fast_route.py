"""Routes that FastAPI documents and plain routes of Starlette serve.

FastAPI's dependency tree, exit stacks and conversions cost more time than Redis needs to store a small group. A fast
route reads its own parameters, with the same types, and is in front of FastAPI's router.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, get_type_hints
from urllib.parse import parse_qsl

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

# route_path is the router's own function: a role is checked for the path that the router would serve, also behind a
# reverse proxy that adds a prefix (`uvicorn --root-path /prefix`).
from starlette._exception_handler import wrap_app_handling_exceptions
from starlette._utils import get_route_path as route_path
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Message, Receive, Scope, Send

from gristmill_api.http.error_handlers import ErrorFormat

__all__ = ["FastRoute", "NeedsSlowPath", "checked", "fast_path", "hot_routes", "route_path"]

Handler = Callable[[Request], Awaitable[Response]]
_MARK: Final = "fast_path"


class NeedsSlowPath(ValueError):
    """The fast path cannot read this body. FastAPI reads it instead, and reports an error if there is one."""


def fast_path(handler: Handler | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks an endpoint of a FastRoute. `handler` answers in place of the endpoint and may raise NeedsSlowPath.

    Without `handler` the endpoint itself answers. It returns a Response and takes dependencies on the request, the
    request, strings of the path and the query, and one model of a JSON body.
    """

    def mark(endpoint: Callable[..., Any]) -> Callable[..., Any]:
        setattr(endpoint, _MARK, (handler,))
        return endpoint

    return mark


class FastRoute(APIRoute):
    """A route whose endpoint may be marked with `fast_path`."""

    error_format = ErrorFormat.NATIVE
    fast: Handler | None = None
    """Answers a request without FastAPI; None for a route that is not marked."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if mark := getattr(endpoint, _MARK, None):
            self.fast = self.wrap(mark[0] or _reader(endpoint, self.dependant))

    def get_route_handler(self) -> Any:
        return self.wrap(super().get_route_handler())

    def wrap(self, handler: Handler) -> Handler:
        """Returns a handler that also does the protocol's work on each request and response."""
        return handler


class HotRoute(Route):
    """A plain route in front of FastAPI's router, for the method and the path of a marked FastRoute."""

    def __init__(self, route: FastRoute, fast: Handler) -> None:
        super().__init__(route.path, route.endpoint, methods=route.methods)
        self.methods = route.methods  # Without HEAD: a HEAD for a batch would lease groups that no client receives.
        self._route = route
        self._fast = fast

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return (match, {**child, "route": self._route}) if match is Match.FULL else (Match.NONE, {})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await (await self._fast(request))(scope, receive, send)

        try:
            await wrap_app_handling_exceptions(answer, request)(scope, receive, send)
        except NeedsSlowPath:
            await self._route.handle(scope, _replay(await request.body(), receive), send)


def hot_routes(routes: Iterable[BaseRoute]) -> list[BaseRoute]:
    """Returns a HotRoute for each marked route."""
    return [HotRoute(route, route.fast) for route in routes if isinstance(route, FastRoute) and route.fast is not None]


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that yields a request's body again, from its start."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        return next(messages, None) or await receive()

    return replay


def _reader(endpoint: Callable[..., Awaitable[Response]], dependant: Dependant) -> Handler:
    """Returns a handler that reads the endpoint's parameters and calls the endpoint."""
    hints = get_type_hints(endpoint, include_extras=True)

    def adapters(fields: Any) -> Any:
        return [(field.name, TypeAdapter(hints[field.name]).validator) for field in fields]

    request_name: Final = dependant.request_param_name
    dependencies: Final = [(found.name or "", found.call) for found in dependant.dependencies]
    in_path: Final = adapters(dependant.path_params)
    in_query: Final = adapters(dependant.query_params)
    in_body: Final = adapters(dependant.body_params)

    async def handle(request: Request) -> Response:
        given: dict[str, Any] = {request_name: request} if request_name else {}
        for name, dependency in dependencies:
            given[name] = await dependency(request)  # type: ignore[misc]  # ours are async functions of the request
        for name, adapter in in_path:
            given[name] = checked(adapter.validate_python, request.scope["path_params"].get(name), "path", name)
        query_string = request.scope["query_string"].decode("latin-1") if in_query else ""
        query = dict(parse_qsl(query_string, keep_blank_values=True))
        for name, adapter in in_query:
            given[name] = checked(adapter.validate_python, query.get(name), "query", name)
        for name, adapter in in_body:
            given[name] = checked(adapter.validate_json, await _json(request), "body")
        return await endpoint(**given)

    return handle


async def _json(request: Request) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        problem = {"loc": ("header", "content-type"), "msg": f"it is {media_type or 'unset'}, not application/json"}
        raise RequestValidationError([problem])
    return await request.body()


def checked(validate: Callable[[Any], Any], value: Any, *where: str) -> Any:
    """Returns the valid value. Raises RequestValidationError, as FastAPI does."""
    try:
        return validate(value)
    except ValidationError as error:
        problems = [{**problem, "loc": (*where, *problem["loc"])} for problem in error.errors(include_url=False)]
        raise RequestValidationError(problems) from error
