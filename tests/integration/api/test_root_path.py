"""The real API behind a reverse proxy that serves it under a prefix and removes the prefix from paths."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.integration.api.store_harness import RUN
from tests.integration.api.test_archive import Loop
from tests.support.api_server import ApiServer

from gristmill import Client


@pytest.fixture
def api(redis_url: str) -> Iterator[ApiServer]:
    # uvicorn reads its options, here --root-path, from such variables too.
    with ApiServer(redis_url, UVICORN_ROOT_PATH="/rig") as api:
        yield api


async def test_run_trains_under_a_prefix(api: ApiServer) -> None:
    async with Client(api.url, patience=60) as client:
        loop = Loop(client)
        await loop.start()
        await loop.step(2)
        assert (await client.audit(RUN)).trained == [group.group_id for group in loop.sent]


def test_documentation_has_the_prefix(api: ApiServer) -> None:
    assert httpx.get(f"{api.url}/openapi.json", timeout=60).json()["servers"] == [{"url": "/rig"}]


def test_both_protocols_keep_their_errors_under_a_prefix(api: ApiServer) -> None:
    assert httpx.get(f"{api.url}/v1/runs/nothing").json()["error"]["code"] == "run_missing"
    assert httpx.get(f"{api.url}/v1/nothing").json()["error"]["code"] == "no_route"
    unknown_host = {"Host": "rebind.example"}
    assert httpx.get(f"{api.url}/v1/runs", headers=unknown_host).json()["error"]["code"] == "host_not_allowed"
    assert httpx.get(f"{api.url}/info", headers=unknown_host).json()["code"] == "host_not_allowed"
    row = {"tokens": [[1]], "masks": [[1]], "scores": [1.0]}
    assert httpx.post(f"{api.url}/scored_data", json=row).json() == {"status": "received"}
    assert httpx.post(f"{api.url}/scored_data", json={}).json()["detail"][0]["loc"] == ["body", "tokens"]
