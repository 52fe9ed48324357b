"""An environment is registered at a real API during its session, with its weight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from tests.support.api_server import ApiServer
from tests.support.redis_server import RedisServer

from gristmill import ApiError, Client, PermitSession, PolicyVersion

RUN = "sums"
TRAINER = {"batch_size": 16, "gradient_accumulation_steps": 1, "training_steps": 4, "max_staleness": 0}
"""With groups of 2: eight permits per step."""


@pytest.fixture(scope="module")
def hasty_api(shared_redis: RedisServer) -> Iterator[ApiServer]:
    """An API that takes an environment for dead after three seconds."""
    with ApiServer(shared_redis.api_url, API_ENV_TTL_S="3") as server:
        yield server


@pytest.fixture
async def api(redis_url: str, hasty_api: ApiServer) -> AsyncIterator[Client]:
    """An open run with a trainer, and all permits of its first step free."""
    async with Client(hasty_api.url, patience=10) as client:
        await client.create_run(RUN, {"model": "tiny"}, 2)
        incarnation, _ = await client.take(RUN, TRAINER, [])
        await client.record_version(RUN, PolicyVersion(incarnation, 0))
        yield client


async def environments(api: Client) -> dict[str, tuple[float | None, bool]]:
    """Returns the API's values for each environment: its weight, and whether it is alive."""
    async with httpx.AsyncClient(base_url=api.url) as http:
        listed = (await http.get(f"/v1/runs/{RUN}/envs")).raise_for_status().json()
    return {env["env_id"]: (env["weight"], env["alive"]) for env in listed}


async def permits(api: Client, holder: str) -> int:
    return len((await api.permits(RUN, holder, 100, 0)).permits)


async def outlive_a_silent_environment(api: Client) -> None:
    """Returns when the API has taken an environment without heartbeats for dead."""
    await api.register_env(RUN, "silent")
    for _ in range(1200):
        if not (await environments(api))["silent"][1]:
            return
        await asyncio.sleep(0.05)
    pytest.fail("it counts as alive for a minute")


async def test_processes_get_permits_by_their_weights(api: Client) -> None:
    heavy = PermitSession(api, RUN, "heavy", weight=3, heartbeat=0.2)
    async with heavy, PermitSession(api, RUN, "light", weight=1, heartbeat=0.2):
        assert [await permits(api, "heavy"), await permits(api, "light")] == [6, 2]


async def test_permit_session_unregisters_its_share_at_the_end(api: Client) -> None:
    async with PermitSession(api, RUN, "env", weight=3):
        assert await environments(api) == {"env": (3.0, True)}
    assert await environments(api) == {}
    with pytest.raises(ZeroDivisionError):
        async with PermitSession(api, RUN, "env", weight=2):
            raise ZeroDivisionError
    assert await environments(api) == {}


async def test_a_process_without_a_share_is_registered_and_keeps_its_run(api: Client) -> None:
    async with PermitSession(api, RUN, "env", heartbeat=0.2):
        assert await environments(api) == {"env": (None, True)}
        assert await permits(api, "env") == 8
        await outlive_a_silent_environment(api)
        with pytest.raises(ApiError) as refused:
            await api.create_run("other", {"model": "tiny"}, 2)
        assert refused.value.code == "run_open"
    await api.create_run("other", {"model": "tiny"}, 2)
    assert (await api.get_run(RUN)).state == "suspended"


async def test_busy_permit_session_stays_alive_through_heartbeats(api: Client) -> None:
    async with PermitSession(api, RUN, "env", weight=2, heartbeat=0.2):
        await outlive_a_silent_environment(api)
        assert (await environments(api))["env"] == (2.0, True)


async def test_permit_session_registers_its_share_again_if_the_api_lost_it(api: Client) -> None:
    async with PermitSession(api, RUN, "env", weight=2, heartbeat=0.1):
        await api.leave_env(RUN, "env")
        for _ in range(200):
            if await environments(api):
                break
            await asyncio.sleep(0.05)
        assert await environments(api) == {"env": (2.0, True)}
