"""The middleware finds the fast routes also under a prefix, and leaves other paths to FastAPI."""

from __future__ import annotations

import httpx
import pytest
from fastapi import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from gristmill_api.http.fast_route import FastPathMiddleware, FastRoute, NeedsSlowPath, fast_path


@fast_path()
async def _fast() -> Response:
    return PlainTextResponse("fast")


async def _not_marked() -> Response:
    raise AssertionError("FastAPI serves this route")


def _client(app: FastPathMiddleware, prefix: str = "") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path=prefix), base_url="http://localhost")


@pytest.mark.parametrize(
    ("prefix", "path", "answered_by"),
    [
        ("", "/groups", "fast"),
        ("/rig", "/rig/groups", "fast"),
        ("/groups", "/groups/groups", "fast"),
        ("/rig", "/rig/other", "fastapi"),
        ("/rig", "/rigs/groups", "fastapi"),
    ],
)
async def test_middleware_finds_fast_routes(prefix: str, path: str, answered_by: str) -> None:
    routes = [FastRoute("/groups", _fast, methods=["GET"]), FastRoute("/other", _not_marked, methods=["GET"])]
    async with _client(FastPathMiddleware(PlainTextResponse("fastapi"), routes), prefix) as http:
        assert (await http.get(path)).text == answered_by
        assert (await http.post(path)).text == "fastapi"


async def test_fastapi_reads_the_whole_body_again_after_the_fast_path_gave_up() -> None:
    async def give_up(request: Request) -> Response:
        assert await request.body() == b"one two"
        raise NeedsSlowPath

    @fast_path(give_up)
    async def endpoint() -> Response:
        raise AssertionError("the handler answers in place of the endpoint")

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        await PlainTextResponse(b"slow: " + body)(scope, receive, send)

    async with _client(FastPathMiddleware(slow, [FastRoute("/groups", endpoint, methods=["PUT"])])) as http:
        assert (await http.put("/groups", content=b"one two")).text == "slow: one two"


async def test_defect_of_a_fast_route_is_raised_to_the_server() -> None:
    @fast_path()
    async def endpoint() -> Response:
        raise KeyError("defect")

    async with _client(FastPathMiddleware(PlainTextResponse("fastapi"), [FastRoute("/groups", endpoint)])) as http:
        with pytest.raises(KeyError):
            await http.get("/groups")
