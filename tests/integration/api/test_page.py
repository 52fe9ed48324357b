"""The page over a live API: a browser's root, a run's state, its events, and the cost of open pages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.api.store_harness import trainer
from tests.support.api_server import ApiServer
from tests.support.groups import make_group

from gristmill import Client, PolicyVersion

RUN = "sums"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
async def page(redis_url: str, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            yield client


async def train(http: httpx.AsyncClient, steps: range) -> None:
    """Does steps of the run as its environment and its trainer."""
    async with Client(str(http.base_url), patience=10) as client:
        if steps.start == 1:
            await client.create_run(RUN, {"dataset": "sums"}, 2)
            incarnation, _ = await client.take(RUN, trainer(steps=3, groups=2), [])
            await client.record_version(RUN, PolicyVersion(incarnation, 0))
            await client.register_env(RUN, "env-1")
        else:
            incarnation = (await client.get_run(RUN)).incarnation
        for step in steps:
            for permit in (await client.permits(RUN, "env-1", 2, wait=5)).permits:
                group = make_group(permit.group_id, RUN, seed=permit.row, rewards=[1.0, 0.0])
                await client.submit(group, "env-1")
            assert await client.lease(RUN, incarnation, f"b{step}", 2, wait=5) is not None
            values = {"reward_mean": step / 4, "tokens": 40, "seconds": {"train": 0.5}, "reward_parts": {"length": 0.5}}
            await client.report_metrics(RUN, "trainer", step, values)
            await client.ack(RUN, incarnation, [f"b{step}"])
            await client.record_version(RUN, PolicyVersion(incarnation, step))


async def test_root_is_the_page_for_browsers_only(page: httpx.AsyncClient) -> None:
    assert (await page.get("/")).json() == {"message": "AtroposLib API"}
    answer = await page.get("/", headers=BROWSER)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]


async def test_run_of_the_api_is_live(page: httpx.AsyncClient) -> None:
    assert (await page.get("/view/api/runs")).json() == []
    await train(page, range(1, 3))
    (line,) = (await page.get("/view/api/runs")).json()
    assert (line["run"], line["step"], line["live"]) == (RUN, 2, True)
    overview = (await page.get(f"/view/api/runs/{RUN}")).json()
    assert (overview["state"], overview["step"], overview["steps"]) == ("open", 2, 3)
    assert overview["queue"]["trained"] == 4
    assert {"api", "trainer", "env env-1"} <= {service["name"] for service in overview["services"]}
    series = (await page.get(f"/view/api/runs/{RUN}/series?names=reward_mean,reward_parts.*")).json()
    assert series["step"] == [1, 2]
    assert series["series"]["reward_mean"]["mean"] == [0.25, 0.5]
    assert series["phases"] == {"train": [0.5, 0.5]}


async def test_page_receives_a_new_step_within_seconds(page: httpx.AsyncClient) -> None:
    await train(page, range(1, 2))
    seen: list[tuple[str, Any]] = []
    listens = asyncio.Event()

    async def listen() -> None:
        async with page.stream("GET", f"/view/api/runs/{RUN}/events?after=1") as stream:
            kind = ""
            async for line in stream.aiter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    seen.append((kind, json.loads(line.removeprefix("data: "))))
                    listens.set()
                    if kind == "step":
                        return

    async with asyncio.timeout(30):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(listen())
            await listens.wait()
            tasks.create_task(train(page, range(2, 3)))
    assert [data["reward_mean"] for kind, data in seen if kind == "step"] == [0.5]
    assert "services" in {kind for kind, _ in seen}


async def test_api_stops_while_a_page_is_open(redis_url: str, tmp_path: Path) -> None:
    with ApiServer(redis_url, GRISTMILL_RUNS_DIR=str(tmp_path)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            await train(client, range(1, 2))
            async with client.stream("GET", f"/view/api/runs/{RUN}/events?after=1") as stream:
                async for _ in stream.aiter_lines():
                    break
                async with asyncio.timeout(10):
                    await asyncio.to_thread(server.stop)
