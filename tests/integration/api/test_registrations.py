"""With tokens, an environment acts on its own registration only, although all environments have the same token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from tests.integration.api.store_harness import PREFIX, RUN, trainer
from tests.support.api_server import ApiServer
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.redis_server import RedisServer

from gristmill import ApiError, Client, Permit, PermitSession, PolicyVersion
from gristmill.internal.calls import WORD_HEADER, new_word

GOOD = "good"
ENV = {"dataset": "d", "trainer": {"training_steps": 10}}


@pytest.fixture(scope="module")
def tokens_api(shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokens")
    for role in ("env", "trainer", "admin"):
        (folder / role).write_text(role * 20)
        (folder / role).chmod(0o600)
    with ApiServer(shared_redis.api_url, API_AUTH="token", API_TOKENS_DIR=str(folder)) as server:
        yield server


class Rig:
    """A run with a living environment that holds permits, and a stranger with the same token."""

    def __init__(self, url: str, redis: Redis) -> None:
        self.url = url
        self.redis = redis
        self.word = new_word()
        self.mine = self.client("env", self.word)
        self.stranger = self.client("env")
        self.trainer = self.client("trainer")
        self.admin = self.client("admin")
        self.held: list[Permit] = []

    def client(self, role: str, word: str | None = None) -> Client:
        return Client(self.url, patience=10, token=role * 20, word=word)

    async def open(self) -> None:
        await self.mine.create_run(RUN, ENV, 2)
        incarnation, _ = await self.trainer.take(RUN, trainer(), [])
        await self.trainer.record_version(RUN, PolicyVersion(incarnation, 0))
        await self.mine.register_env(RUN, GOOD)
        await self.stranger.register_env(RUN, "stranger")
        self.held = (await self.mine.permits(RUN, GOOD, 2, wait=5)).permits

    async def expire_registration(self) -> None:
        await self.redis.zadd(PREFIX + "envs", {GOOD: 1}, xx=True)

    async def close(self) -> None:
        for client in (self.mine, self.stranger, self.trainer, self.admin):
            await client.close()


@pytest.fixture
async def rig(redis_url: str, redis: Redis, tokens_api: ApiServer) -> AsyncIterator[Rig]:
    rig = Rig(tokens_api.url, redis)
    await rig.open()
    yield rig
    await rig.close()


Call = Callable[[Client, list[Permit]], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "register": lambda client, held: client.register_env(RUN, GOOD, weight=9.0),
    "heartbeat": lambda client, held: client.heartbeat_env(RUN, GOOD),
    "permits": lambda client, held: client.permits(RUN, GOOD, 1, wait=0),
    "renew": lambda client, held: client.renew_permits(RUN, GOOD, [held[0].group_id]),
    "renew all": lambda client, held: client.renew_permits(RUN, GOOD, None),
    "submit": lambda client, held: client.submit(make_group(held[0].group_id, RUN, seed=1, env_id=GOOD), GOOD),
    "metrics": lambda client, held: client.report_metrics(RUN, GOOD, 1, {"loss": 1.0}),
    "claim": lambda client, held: client.claim(RUN, "evaluation-0", GOOD, 60),
    "return": lambda client, held: client.return_permit(RUN, GOOD, held[1].group_id, "too_long"),
    "return unfinished": lambda client, held: client.return_permit(RUN, GOOD, held[1].group_id, "abandoned"),
    "abandon": lambda client, held: client.abandon_permits(RUN, GOOD),
    "leave": lambda client, held: client.leave_env(RUN, GOOD),
}
"""Every call under the name of an environment. The owner may do them in this order, except the second return."""


async def test_environment_acts_on_its_own_registration_only(rig: Rig) -> None:
    wordless = {"Authorization": f"Bearer {'env' * 20}"}
    for name, call in CALLS.items():
        with pytest.raises(ApiError) as refused:
            await call(rig.stranger, rig.held)
        assert (refused.value.status, refused.value.code) == (409, "other_registration"), name
    with raises(ApiError, "other_registration"):
        await rig.stranger.abandon_permits(RUN, GOOD, creation=(await rig.mine.get_run(RUN)).creation)
    async with httpx.AsyncClient(base_url=f"{rig.url}/v1/runs/{RUN}", headers=wordless) as plain:
        answer = await plain.post("/permits/abandon", json={"holder": GOOD})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "other_registration"), "without any word"
        assert (await plain.delete(f"/envs/{GOOD}", headers={WORD_HEADER: "x"})).status_code == 422
        answer = await plain.post("/envs", json={"env_id": "plain"})
        own = {WORD_HEADER: answer.json()["word"]}
        assert (await plain.post("/envs/plain/heartbeat")).status_code == 409
        assert (await plain.post("/envs/plain/heartbeat", headers=own)).status_code == 204
        assert own[WORD_HEADER] not in (await plain.get("/envs")).text
    assert {env.env_id for env in await rig.admin.environments(RUN)} == {GOOD, "stranger", "plain"}
    audit = await rig.admin.audit(RUN)
    assert (audit.outstanding, audit.dropped) == ([permit.group_id for permit in rig.held], {})
    for name, call in CALLS.items():
        if name != "return unfinished":
            await call(rig.mine, rig.held)
    await rig.stranger.abandon_permits(RUN, GOOD)  # no environment has the name any more


@pytest.mark.parametrize("source", ["trainer", "eval", "evaluate", "data.rows"])
async def test_environment_may_not_have_the_name_of_a_source_of_others(rig: Rig, source: str) -> None:
    with raises(ApiError, "bad_request"):
        await rig.stranger.register_env(RUN, source)


async def test_registration_under_the_name_of_a_shared_source_refuses_no_rows(rig: Rig) -> None:
    await rig.redis.hset(PREFIX + "env:eval", "word", new_word())  # An earlier version of the API allowed it.
    await rig.mine.report_metrics(RUN, "eval", 1, {"score": 1.0})


async def test_admin_may_act_for_every_environment(rig: Rig) -> None:
    for name, call in CALLS.items():
        if name not in ("return unfinished", "register"):
            await call(rig.admin, rig.held)


async def test_successor_takes_the_registration_over_with_its_word_or_when_it_has_expired(rig: Rig) -> None:
    async with rig.client("env", rig.word) as successor:
        await successor.register_env(RUN, GOOD)
        assert await successor.renew_permits(RUN, GOOD, [rig.held[0].group_id]) == []
    await rig.expire_registration()
    for call in ("abandon", "leave", "permits", "heartbeat"):
        with raises(ApiError, "other_registration"):
            await CALLS[call](rig.stranger, rig.held)
    await rig.stranger.register_env(RUN, GOOD)
    await rig.stranger.heartbeat_env(RUN, GOOD)
    with raises(ApiError, "other_registration"):
        await rig.mine.heartbeat_env(RUN, GOOD)


async def test_session_waits_for_a_dead_predecessor_and_refuses_a_living_one(rig: Rig) -> None:
    async with rig.client("env") as api:
        session = PermitSession(api, RUN, GOOD, heartbeat=0.2)
        entering = asyncio.create_task(session.__aenter__())
        done, _ = await asyncio.wait([entering], timeout=0.5)
        assert not done
        await rig.expire_registration()
        await entering
        await session.__aexit__(None, None, None)
        await rig.mine.register_env(RUN, GOOD)

        async def beat() -> None:
            while True:
                await rig.mine.heartbeat_env(RUN, GOOD)
                await asyncio.sleep(0.05)

        beating = asyncio.create_task(beat())
        with raises(ApiError, "other_registration"):
            await PermitSession(api, RUN, GOOD, heartbeat=0.2).__aenter__()
        beating.cancel()


async def test_evaluations_come_from_registered_environments(rig: Rig) -> None:
    async with rig.client("env") as unknown:
        for source in ("eval", "data.rows"):
            with pytest.raises(ApiError) as refused:
                await unknown.report_metrics(RUN, source, 1, {"pass@1": 1.0})
            assert (refused.value.status, refused.value.code) == (404, "env_missing"), source
        await unknown.report_metrics(RUN, "mine", 1, {"loss": 1.0})
    await rig.mine.report_metrics(RUN, "eval", 1, {"pass@1": 0.5})
    await rig.admin.report_metrics(RUN, "eval", 2, {"pass@1": 0.5})
    assert [row.step for row in await rig.admin.metrics(RUN, "eval")] == [1, 2]


async def test_environment_neither_replaces_nor_suspends_nor_extends_the_run_of_another(rig: Rig) -> None:
    longer = {**ENV, "trainer": {"training_steps": 20}}
    for run_id, env, code in (
        (RUN, {"dataset": "other"}, "config_differs"),
        ("next", ENV, "run_open"),
        (RUN, longer, "run_in_use"),
    ):
        with pytest.raises(ApiError) as refused:
            await rig.stranger.create_run(run_id, env, 2)
        assert (refused.value.status, refused.value.code) == (409, code)
    # Nothing is registered, and permits are out.
    await rig.redis.zadd(PREFIX + "envs", {GOOD: 1, "stranger": 1}, xx=True)
    for run_id, env in ((RUN, {"dataset": "other"}), ("next", ENV)):
        with pytest.raises(ApiError) as refused:
            await rig.stranger.create_run(run_id, env, 2)
        assert (refused.value.status, refused.value.code) == (409, "run_in_use")
    assert (await rig.admin.get_run(RUN)).state == "open"
    await rig.mine.abandon_permits(RUN, GOOD)
    assert (await rig.stranger.create_run("next", ENV, 2)).state == "open"
    assert (await rig.admin.get_run(RUN)).state == "suspended"


async def test_without_tokens_every_client_may_act_for_every_environment(redis_url: str, shared_api: ApiServer) -> None:
    async with Client(shared_api.url, patience=10) as one, Client(shared_api.url, patience=10) as other:
        await one.create_run(RUN, {"dataset": "d"}, 2)
        await one.register_env(RUN, GOOD)
        await other.register_env(RUN, GOOD, weight=2.0)
        await other.abandon_permits(RUN, GOOD)
        await other.report_metrics(RUN, "eval", 1, {"pass@1": 1.0})
        await other.leave_env(RUN, GOOD)
