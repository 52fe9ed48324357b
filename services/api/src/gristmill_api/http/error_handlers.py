"""Turns every exception into an error response of the protocol that the route belongs to.

/v1 sends `{"error": {"code", "message", "remedy"}}`. At the API's root, clients of Atropos read `{"detail": ...}`.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gristmill.internal.logs import line
from gristmill_api import errors
from gristmill_api.errors import ApiProblem
from gristmill_api.http.content_coding import InvalidGzip

_LOG = logging.getLogger(__name__)
_MOST_PROBLEMS: Final = 1000
_MOST_QUOTED: Final = 4096
"""Most characters, entries and values of a part of a request that an error quotes."""


class ErrorFormat(Enum):
    """The shape of error responses. A route names its shape as `error_format`."""

    NATIVE = "native"
    ATROPOS = "atropos"


def install(app: FastAPI) -> None:
    """Register the handlers. An exception that has no error response is a defect: status 500, traceback in the log."""
    for kind in (ApiProblem, RedisError, RequestValidationError, HTTPException, ClientDisconnect, InvalidGzip):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(Exception, _defect)


def error_response(request: Request, error: Exception) -> Response | None:
    """Returns the response for an exception; None if the exception is a defect of the API."""
    error = _unwrapped(error)
    if getattr(request.scope.get("route"), "error_format", ErrorFormat.NATIVE) is ErrorFormat.ATROPOS:
        return _atropos(request, error)
    return _native(request, error)


def refusal_code(error: Exception) -> str:
    """Returns the code of the problem that an exception is for the client."""
    error = _unwrapped(error)
    if isinstance(error, ApiProblem):
        return error.code
    if isinstance(error, ClientDisconnect):
        return errors.client_gone().code
    return "internal" if isinstance(error, RedisError) else "bad_request"


def _unwrapped(error: Exception) -> Exception:
    if isinstance(error, HTTPException) and isinstance(error.__cause__, ApiProblem | ClientDisconnect):
        error = error.__cause__  # FastAPI wraps exceptions that are raised while it reads a body.
    if isinstance(error, RedisError):
        error = errors.from_redis(error) or error
    return error


def problem_response(problem: ApiProblem, shape: ErrorFormat, headers: dict[str, str] | None = None) -> JSONResponse:
    """Returns the response for a problem."""
    headers = {**problem.headers(), **(headers or {})}
    if shape is ErrorFormat.NATIVE:
        return JSONResponse(problem.body(), problem.status, headers)
    # Clients of Atropos drop the data of a group after status 429.
    return JSONResponse(problem.detail(), 503 if problem.status == 429 else problem.status, headers)


def log_problem(request: str, problem: ApiProblem) -> None:
    """Log that a request was refused. `request`: its method and path."""
    _LOG.warning(line("refused", request=request, code=problem.code, why=problem.message))


def _native(request: Request, error: Exception) -> Response | None:
    headers: dict[str, str] = {}
    if isinstance(error, RequestValidationError):
        problem = _invalid(error)
    elif isinstance(error, HTTPException):
        problem, headers = _from_http(request, error)
    elif isinstance(error, ClientDisconnect):
        problem = errors.client_gone()  # Nobody receives this response. It is counted and logged.
    elif isinstance(error, ApiProblem):
        problem = error
    else:
        return None
    # While Redis is down, the task that listens to Redis logs that once.
    if problem.status != 503:
        log_problem(f"{request.method} {request.url.path}", problem)
    return problem_response(problem, ErrorFormat.NATIVE, headers)


def _atropos(request: Request, error: Exception) -> Response | None:
    if isinstance(error, ApiProblem):
        log_problem(f"{request.method} {request.url.path}", error)
        return problem_response(error, ErrorFormat.ATROPOS)
    if isinstance(error, InvalidGzip):
        log_problem(f"{request.method} {request.url.path}", errors.bad_request(f"{error}."))
        return PlainTextResponse("Invalid gzip payload", 400)
    if isinstance(error, RequestValidationError):
        log_problem(f"{request.method} {request.url.path}", _invalid(error))
        return _validation_detail(error)
    # Atropos has no shape for a method that a path does not allow. A client that hung up receives no response.
    if isinstance(error, HTTPException) and error.status_code != 405:
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)
    return _native(request, error)


def _invalid(error: RequestValidationError) -> ApiProblem:
    where = "; ".join(
        f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:_MOST_PROBLEMS]
    )
    return errors.bad_request(f"{where}.")


def _validation_detail(error: RequestValidationError) -> JSONResponse:
    """Returns FastAPI's own response, which Atropos' server sends, of at most `_MOST_PROBLEMS`.

    A long value is not quoted: a request may have many megabytes.
    """
    quoted = [
        {key: value for key, value in problem.items() if key != "input" or _is_short(value)}
        for problem in error.errors()[:_MOST_PROBLEMS]
    ]
    try:
        return JSONResponse({"detail": jsonable_encoder(quoted)}, 422)
    except ValueError:  # An entry quotes a NaN, which JSON cannot hold.
        detail = [{key: problem[key] for key in ("type", "loc", "msg")} for problem in quoted]
        return JSONResponse({"detail": detail}, 422)


def _is_short(value: object) -> bool:
    """Returns whether a value of a request has few parts. Takes bounded time."""
    parts, room = [value], _MOST_QUOTED
    while parts and room > 0:
        part = parts.pop()
        room -= len(part) + 1 if isinstance(part, str | bytes | list | dict) else 1
        if room > 0 and isinstance(part, list | dict):
            parts += part.values() if isinstance(part, dict) else part
    return room > 0


def _from_http(request: Request, error: HTTPException) -> tuple[ApiProblem, dict[str, str]]:
    code = {404: "no_route", 405: "no_method"}.get(error.status_code, "bad_request")
    problem = ApiProblem(
        code, error.status_code, f"{request.method} {request.url.path}: {error.detail}.", "See docs/api.md."
    )
    headers = dict(error.headers or {})
    if error.status_code == 405 and (methods := _methods(request)):
        headers["Allow"] = ", ".join(sorted(methods))
    return problem, headers


def _methods(request: Request) -> set[str]:
    """Returns the methods that the OpenAPI document lists for the path. Starlette names one route's methods only."""
    app: FastAPI = request.app
    path = getattr(request.scope.get("route"), "path", "")
    return {method.upper() for method in app.openapi()["paths"].get(path, ())}


async def _handle(request: Request, error: Exception) -> Response:
    return error_response(request, error) or await _defect(request, error)


async def _defect(request: Request, error: Exception) -> Response:
    if isinstance(error, RedisError):
        _LOG.error("%s %s: Redis refused a command of ours", request.method, request.url.path, exc_info=error)
    return JSONResponse(errors.internal(error).body(), 500)


class Reason(BaseModel):
    """The error, for programs and for people."""

    model_config = ConfigDict(extra="forbid")

    code: str
    """Stable: clients act on the code."""
    message: str
    """Names the thing and the place."""
    remedy: str
    """What to do about it."""


class Refusal(BaseModel):
    """The body of every error of /v1."""

    model_config = ConfigDict(extra="forbid")

    error: Reason


class Detail(BaseModel):
    """The body of an error at the API's root, as Atropos' clients read it."""

    detail: str
    code: str | None = None
    """The stable code of an error that Atropos' server does not have, such as `too_large`."""


def documented(description: str, **more: Any) -> dict[str, Any]:
    """Returns the OpenAPI entry of an error response of /v1."""
    # FastAPI would describe the error in the media type of the route's other responses.
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{Refusal.__name__}"}}}
    return {"content": content, "description": description, **more}


_RETRY_AFTER: Final = {
    "headers": {
        "Retry-After": {
            "description": "Seconds after which the same request may succeed.",
            "required": True,
            "schema": {"type": "integer", "minimum": 1},
        }
    }
}

_REFUSALS: Final = {
    400: documented("The body cannot be read, or the group in it is not valid. Nothing was stored."),
    404: documented("The thing, or the run of this id, does not exist."),
    409: documented("The run, the group or the batch is in a state that forbids the request: read `code`."),
    410: documented("The permit or the lease expired, and another client has what it covered."),
    413: documented("The body is larger than the API accepts."),
    415: documented("The body has a media type that this route does not read."),
    421: documented("The API does not answer for the host that the request names."),
    422: documented("A field is missing, unknown or out of its bounds: `message` names the field."),
    429: documented("The store is full. The same request may succeed later.", **_RETRY_AFTER),
    503: documented("Redis is away. The API recovers with Redis.", **_RETRY_AFTER),
}
REFUSALS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": Refusal, **refusal} for status, refusal in _REFUSALS.items()
}
"""For `APIRouter(responses=...)` of /v1: each route may answer so. access/permissions.py adds 401 and 403."""

ATROPOS_REFUSALS: Final[dict[int | str, dict[str, Any]]] = {
    400: {
        "description": "The body is not the gzip or the JSON that its headers name.",
        "content": {
            "text/plain": {"schema": {"type": "string"}},
            "application/json": {"schema": Detail.model_json_schema()},
        },
    },
    404: {"model": Detail, "description": "The environment does not exist."},
    409: {"model": Detail, "description": "The run of the root is finished, or belongs to /v1."},
    413: {"model": Detail, "description": "The body is larger than the API accepts."},
    421: {"model": Detail, "description": "The API does not answer for the host that the request names."},
    503: {"model": Detail, "description": "The store is full or away. Try again: nothing was stored."},
}
"""For the routes of the root. 422 is FastAPI's own."""
