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
    """For endpoints that return a Response and take nothing but `ctx`, `request` and strings of the path or query.

    Include the routes in the application as they are: a router that is included wraps its routes in new ones.
    """

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        hints: Final = get_type_hints(endpoint, include_extras=True)
        in_path: Final = [(field.name, TypeAdapter(hints[field.name])) for field in self.dependant.path_params]
        in_query: Final = [(field.name, TypeAdapter(hints[field.name])) for field in self.dependant.query_params]

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive, send)
            given = {name: _checked("path", name, adapter, scope["path_params"].get(name)) for name, adapter in in_path}
            for name, adapter in in_query:
                given[name] = _checked("query", name, adapter, request.query_params.get(name))
            response = await endpoint(ctx=request.app.state.context, request=request, **given)
            await response(scope, receive, send)

        self.app = run


def _checked(where: str, name: str, adapter: TypeAdapter[str], value: str | None) -> str:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise RequestValidationError([{**problem, "loc": (where, name)} for problem in error.errors()]) from error
