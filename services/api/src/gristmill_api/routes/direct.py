"""Routes that FastAPI documents but does not stand in front of.

Its dependency tree, exit stacks and conversions cost a request more than Redis takes to store a small group. So the
routes that every group passes read their parameters themselves, once per request and with the same types.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

Endpoint = Callable[..., Awaitable[Response]]


class Direct(APIRoute):
    """For endpoints that return a Response and take nothing but `ctx`, `request`, strings of the path or the query,
    and a model of a JSON body.

    Put the routes into the application as they are: a router that is included wraps its routes in new ones.
    """

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        hints = get_type_hints(endpoint, include_extras=True)

        def adapters(fields: Any) -> Any:
            return [(field.name, TypeAdapter(hints[field.name])) for field in fields]

        in_path: Final = adapters(self.dependant.path_params)
        in_query: Final = adapters(self.dependant.query_params)
        in_body: Final = adapters(self.dependant.body_params)

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive, send)
            given: dict[str, Any] = {"ctx": request.app.state.context, "request": request}
            for name, adapter in in_path:
                given[name] = _checked(adapter.validate_python, scope["path_params"].get(name), "path", name)
            for name, adapter in in_query:
                given[name] = _checked(adapter.validate_python, request.query_params.get(name), "query", name)
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
