"""Fast routes answer also under a prefix, and leave other paths and methods to FastAPI."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from gristmill_api.http.fast_route import FastRoute, NeedsSlowPath, fast_path, hot_routes


@fast_path()
async def _fast() -> Response:
    return PlainTextResponse("fast")


async def _not_marked() -> Response:
    return PlainTextResponse("fastapi")


def _client(*routes: FastRoute, prefix: str = "") -> httpx.AsyncClient:
    app = FastAPI()
    app.router.routes[:] = [*hot_routes(routes), *routes]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path=prefix), base_url="http://localhost")


@pytest.mark.parametrize(
    ("prefix", "path", "answered_by"),
    [
        ("", "/groups", "fast"),
        ("/rig", "/rig/groups", "fast"),
        ("/groups", "/groups/groups", "fast"),
        ("/rig", "/rig/other", "fastapi"),
        ("/rig", "/rigs/groups", '{"detail":"Not Found"}'),
    ],
)
async def test_fast_routes_are_found(prefix: str, path: str, answered_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unused(route: FastRoute) -> None:
        raise AssertionError(f"FastAPI handles {route.path}")

    fast = FastRoute("/groups", _fast, methods=["GET"])
    monkeypatch.setattr(fast, "app", unused)
    async with _client(fast, FastRoute("/other", _not_marked, methods=["GET"]), prefix=prefix) as http:
        assert (await http.get(path)).text == answered_by
        for method in ("POST", "HEAD"):
            assert (await http.request(method, path)).status_code in (404, 405)


async def test_fastapi_reads_the_whole_body_again_after_the_fast_path_gave_up() -> None:
    async def give_up(request: Request) -> Response:
        assert await request.body() == b"one two"
        raise NeedsSlowPath

    @fast_path(give_up)
    async def endpoint(request: Request) -> Response:
        return PlainTextResponse(b"slow: " + await request.body())

    async with _client(FastRoute("/groups", endpoint, methods=["PUT"])) as http:
        assert (await http.put("/groups", content=b"one two")).text == "slow: one two"


async def test_defect_of_a_fast_route_is_raised_to_the_server() -> None:
    @fast_path()
    async def endpoint() -> Response:
        raise KeyError("defect")

    async with _client(FastRoute("/groups", endpoint)) as http:
        with pytest.raises(KeyError):
            await http.get("/groups")
