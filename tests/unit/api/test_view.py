"""The page in the API: browsers get it at the root, other clients Atropos' JSON; data need a token, files do not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.testclient import TestClient
from tests.support.demo_runs import DemoSource

from gristmill import RunRecord, RunState
from gristmill_api import access, atropos
from gristmill_api.access.settings import AccessSettings, Role, Tokens
from gristmill_api.view import LiveRuns
from gristmill_view.app import PageFiles, api_routes

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
TOKENS = {role: f"{role}-" + "x" * 40 for role in Role}


@pytest.fixture
def client() -> Iterator[TestClient]:
    guard = access.middlewares(AccessSettings(tokens=Tokens(TOKENS)))
    app = FastAPI(middleware=[Middleware(PageFiles), *guard])
    app.router.routes += api_routes(DemoSource(lambda: 0.0))
    app.include_router(atropos.router)
    with TestClient(app) as client:
        yield client


def bearer(role: Role) -> dict[str, str]:
    return {"authorization": f"Bearer {TOKENS[role]}"}


def test_root_is_the_page_for_browsers_and_json_for_others(client: TestClient) -> None:
    page = client.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["vary"].split(", ")[0] == "Accept"
    for accept in ("*/*", "application/json"):
        answer = client.get("/", headers={"accept": accept, **bearer(Role.ENV)})
        assert answer.json() == {"message": "AtroposLib API"}
        assert client.get("/", headers={"accept": accept}).status_code == 401


@pytest.mark.parametrize("path", ["/view", "/view/run/step/1", "/view/static/app.js"])
def test_files_of_the_page_need_no_token(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    "path", ["/view/api/runs", "/view/api/runs/quickstart/rollouts", "/view/api/runs/quickstart/groups/g00000001"]
)
def test_data_need_a_token_of_any_role(client: TestClient, path: str) -> None:
    assert client.get(path, headers=BROWSER).status_code == 401
    for role in Role:
        assert client.get(path, headers=bearer(role)).status_code == 200


def test_page_refuses_requests_that_change_data(client: TestClient) -> None:
    for path in ("/", "/view", "/view/static/app.js", "/view/api/runs"):
        assert client.post(path, headers={**BROWSER, **bearer(Role.ENV)}).status_code in (403, 404, 405)


async def test_pages_that_wait_for_redis_hold_up_no_other_work_of_the_api() -> None:
    """Submits and the archive use the event loop's threads, of which there are four more than cores, and 32 at most."""
    reading, answered, asked = asyncio.Event(), asyncio.Event(), Counter[str]()

    async def record(run_id: str) -> RunRecord:
        asked[run_id] += 1
        if asked[run_id] > 1:  # for the reader, which waits in a thread
            reading.set()
            await answered.wait()
        return RunRecord(run_id=run_id, state=RunState.FINISHED, digest="", group_size=2, env={}, created_at=0)

    async def exists(run_id: str) -> bool:
        return True

    store: Any = SimpleNamespace(runs=SimpleNamespace(exists=exists, record=record))
    live = LiveRuns(store)
    pages = [asyncio.create_task(live.facts(f"run-{number}")) for number in range(40)]
    try:
        await asyncio.wait_for(reading.wait(), 30)
        assert await asyncio.wait_for(asyncio.to_thread(str, 1), 5) == "1"
    finally:
        answered.set()
        await asyncio.gather(*pages, return_exceptions=True)
