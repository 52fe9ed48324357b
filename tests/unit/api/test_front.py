"""The middleware of the fast routes finds them also under a prefix, and leaves other paths to FastAPI."""

from __future__ import annotations

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gristmill_api.routes.direct import Front


async def _fast(_: object) -> PlainTextResponse:
    return PlainTextResponse("fast")


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
async def test_front_finds_fast_routes(prefix: str, path: str, answered_by: str) -> None:
    front = Front(PlainTextResponse("fastapi"), [Route("/groups", _fast)], {})
    transport = httpx.ASGITransport(front, root_path=prefix)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.get(path)).text == answered_by
