"""Turns every failure into the one JSON shape of errors.py."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gristmill.logs import line
from gristmill_api import errors
from gristmill_api.errors import Refused

_LOG = logging.getLogger(__name__)


def install(app: FastAPI) -> None:
    """Register the handlers. What none of them knows is a defect of ours: a 500 and a traceback in the log."""
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RedisError, _redis)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _defect)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    # While Redis is down the watching task tells so once; a line a request would bury it.
    if error.status != 503:
        path = f"{request.method} {request.url.path}"
        _LOG.warning(line("refused", request=path, code=error.code, why=error.message))
    return JSONResponse(error.body(), error.status, error.headers())


async def _redis(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RedisError)
    refused = errors.from_redis(error)
    if refused is None:
        return await _defect(request, error)
    return await _refused(request, refused)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    where = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
    return await _refused(request, errors.bad_request(f"{where}."))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    # FastAPI wraps whatever reading a body raised.
    if isinstance(error.__cause__, Refused):
        return await _refused(request, error.__cause__)
    code = {404: "no_route", 405: "no_method"}.get(error.status_code, "bad_request")
    refused = Refused(code, error.status_code, f"{request.method} {request.url.path}: {error.detail}.", "See /docs.")
    answer = await _refused(request, refused)
    answer.headers.update(error.headers or {})
    if error.status_code == 405 and (methods := _methods(request)):
        answer.headers["Allow"] = ", ".join(sorted(methods))
    return answer


def _methods(request: Request) -> set[str]:
    """What the document tells that the path takes: Starlette names the methods of the first route on it only."""
    app: FastAPI = request.app
    path = getattr(request.scope.get("route"), "path", "")
    return {method.upper() for method in app.openapi()["paths"].get(path, ())}


async def _gone(request: Request, error: Exception) -> JSONResponse:
    """Nobody hears this; it is what is counted and logged."""
    return await _refused(request, errors.client_gone())


async def _defect(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RedisError):
        _LOG.error("%s %s: Redis refused a command of ours", request.method, request.url.path, exc_info=error)
    return JSONResponse(errors.internal(error).body(), 500)
