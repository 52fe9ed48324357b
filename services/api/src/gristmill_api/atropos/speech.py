"""How the root talks: gzip both ways, and errors in the shapes that Atropos' clients know."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import Request, Response
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from gristmill.logs import line
from gristmill_api import errors
from gristmill_api.atropos.deflate import deflate
from gristmill_api.atropos.inflate import InvalidGzip, inflated
from gristmill_api.bounds import reserve_inflated
from gristmill_api.errors import Refused

_LOG = logging.getLogger(__name__)
Answer = Callable[[Request], Awaitable[Response]]


class Detail(BaseModel):
    """An error as Atropos' clients know it."""

    detail: str
    code: str | None = None
    """The stable code of an error that only this API has, such as `too_large`."""


REFUSALS: Final[dict[int | str, dict[str, Any]]] = {
    400: {
        "description": "The body is not the gzip or the JSON that it says it is.",
        "content": {
            "text/plain": {"schema": {"type": "string"}},
            "application/json": {"schema": Detail.model_json_schema()},
        },
    },
    404: {"model": Detail, "description": "There is no such environment."},
    409: {"model": Detail, "description": "The run that the root is bound to is finished, or is none of Atropos'."},
    413: {"model": Detail, "description": "The body is larger than the API takes."},
    421: {"model": Detail, "description": "The API does not answer for the host that the request names."},
    503: {"model": Detail, "description": "The store is full or away. Try again: nothing was taken."},
}
"""What any route of the root may answer, for the OpenAPI document. 422 is FastAPI's."""


class Plain(Request):
    """A request whose body was inflated."""

    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body


async def spoken(request: Request, answer: Answer) -> Response:
    """The root's answer to a request: inflated for `answer`, and deflated after it, errors in the root's shapes."""
    try:
        return await deflate(request, await answer(await _plain(request)))
    except InvalidGzip:
        return PlainTextResponse("Invalid gzip payload", 400)
    except RequestValidationError as error:
        return await _invalid(request, error)
    except HTTPException as error:
        if not isinstance(error.__cause__, Refused):  # FastAPI wraps what reading a body raised
            return JSONResponse({"detail": error.detail}, error.status_code)
        return _refused(request, error.__cause__)
    except Refused as error:
        return _refused(request, error)
    except RedisError as error:
        refused = errors.from_redis(error)
        if refused is None:
            raise
        return _refused(request, refused)


class AtroposRoute(APIRoute):
    """A route of the root."""

    def get_route_handler(self) -> Any:
        handler = super().get_route_handler()

        async def speak(request: Request) -> Response:
            return await spoken(request, handler)

        return speak


class DirectRoute(AtroposRoute):
    """For an endpoint that returns a Response and takes `door` and `request` only: FastAPI documents it, but does not
    stand in front of it. Put it into the application as it is: a router that is included wraps its routes in new ones.
    """

    def __init__(self, path: str, endpoint: Callable[..., Awaitable[Response]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def answer(request: Request) -> Response:
            return await endpoint(door=request.app.state.atropos, request=request)

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            response = await spoken(Request(scope, receive, send), answer)
            await response(scope, receive, send)

        self.app = run


async def _plain(request: Request) -> Request:
    if "gzip" not in request.headers.get("content-encoding", "").lower():
        return request
    limit = request.app.state.context.limits.max_body_bytes
    reserve = functools.partial(reserve_inflated, request.scope)
    return Plain(request, await inflated(await request.body(), limit, reserve))


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    try:
        return await request_validation_exception_handler(request, error)
    except ValueError:  # it quotes a NaN, which JSON has not
        detail = [{key: told[key] for key in ("type", "loc", "msg")} for told in error.errors()]
        return JSONResponse({"detail": detail}, 422)


def _refused(request: Request, refused: Refused) -> Response:
    _LOG.warning(
        line("refused", request=f"{request.method} {request.url.path}", code=refused.code, why=refused.message)
    )
    # Whatever it is: it is not the data's fault, and a 429 would make its sender drop it.
    status = 503 if refused.status == 429 else refused.status
    return JSONResponse(refused.detail(), status, refused.headers())
