"""Redis as `make secure` sets it up: the API does all of its work, and its user can do nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from tests.integration.api.store_harness import RUN, trainer
from tests.support.api_server import ApiServer
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.redis_server import PASSWORD, RedisServer

from gristmill import ApiError, Client, PolicyVersion, read_rollouts


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def test_api_user_may_do_everything_from_run_creation_to_deletion(server: RedisServer, tmp_path: Path) -> None:
    """Expiry of permits and leases, long-polls woken over pub/sub, a redelivery, an ack, the archive, the end."""
    environ = {"API_LEASE_TTL_S": "0.5", "API_PERMIT_TTL_S": "0.5", "GRISTMILL_RUNS_DIR": str(tmp_path)}
    with ApiServer(server.api_url, **environ) as api:
        async with Client(api.url, patience=10) as client, httpx.AsyncClient(base_url=api.url) as http:
            opened = asyncio.create_task(client.open_run(wait=20))
            await client.create_run(RUN, {"dataset": "d"}, 2)
            assert await opened is not None
            incarnation, _ = await client.take(RUN, trainer(), [])
            waiting = asyncio.create_task(client.permits(RUN, "env-1", 4, wait=20))
            await client.record_version(RUN, PolicyVersion(incarnation, 0))
            lost, *_ = (await waiting).permits
            again: list[str] = []
            while lost.group_id not in again:  # its holder does not renew it: another holder gets it
                again += [permit.group_id for permit in (await client.permits(RUN, "env-2", 8, wait=5)).permits]
            leased = asyncio.create_task(client.lease(RUN, incarnation, "b1", 2, wait=20))
            for group_id in again[:2]:
                assert await client.submit(make_group(group_id, RUN, seed=1), "env-2")
            batch = await leased
            assert batch is not None
            redelivered = await client.lease(RUN, incarnation, "b2", 2, wait=20)  # the first lease runs out meanwhile
            assert redelivered is not None
            assert [group.group_id for group in redelivered] == [group.group_id for group in batch]
            await client.ack(RUN, incarnation, ["b2"])
            for path in ("/metrics", "/v1/runs", f"/v1/runs/{RUN}/status", f"/v1/runs/{RUN}/groups"):
                assert (await http.get(path)).status_code == 200, path
            await client.close_run(RUN)
            while (await http.delete(f"/v1/runs/{RUN}")).status_code == 409:  # noqa: ASYNC110  until it is archived
                await asyncio.sleep(0.1)
            assert [group.group_id for group in read_rollouts(tmp_path / RUN)] == [group.group_id for group in batch]
            with raises(ApiError, "run_missing"):
                await client.status(RUN)
    assert server.refused() <= {"client|setinfo", "config|get"}


REFUSED = """
    FLUSHALL | FLUSHDB | KEYS * | SCAN 0 | CONFIG GET * | CONFIG SET maxmemory 1gb | ACL LIST | ACL SETUSER api +@all
    SHUTDOWN NOSAVE | MONITOR | CLIENT LIST | BGREWRITEAOF | SCRIPT FLUSH | EVAL return 0 | DUMP gm:runs | GET other
    SET other:gm:key x | RENAME gm:runs other | PUBLISH other x | SUBSCRIBE other | PSUBSCRIBE *
""".replace("\n", "|").split("|")


def test_api_user_is_refused_every_other_command(server: RedisServer) -> None:
    with redis.Redis.from_url(server.api_url) as api:
        for command in filter(None, map(str.strip, REFUSED)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                print(command, api.execute_command(*command.split()))  # noqa: T201  told only when it was let through
        assert api.ping()


def test_lua_script_has_only_the_permissions_of_its_user(server: RedisServer) -> None:
    with redis.Redis.from_url(server.api_url) as api:
        for text in ("return redis.call('FLUSHALL')", "return redis.call('GET', 'other')"):
            script = api.script_load(text)
            with pytest.raises(redis.exceptions.RedisError, match=r"(?i)no permission|can't run|ACL|not allowed"):
                api.evalsha(script, 0)


def test_redis_refuses_a_wrong_password(server: RedisServer) -> None:
    wrong = redis.Redis.from_url(server.api_url.replace(PASSWORD, "wrong"))
    with wrong, pytest.raises(redis.exceptions.AuthenticationError):
        wrong.ping()


def test_health_user_may_only_ping(server: RedisServer) -> None:
    with redis.Redis(port=server.port, username="health", password="health") as health:
        assert health.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            health.get("gm:runs")
