"""Redis as `make secure` sets it up: the API does all of its work, and its user can do nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from tests.integration.api.store_harness import RUN, trainer
from tests.support.api_server import ApiServer
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.redis_server import ADMIN, PASSWORD, RedisServer

from gristmill import ApiError, Client, PolicyVersion, read_rollouts
from secure import ROOT


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
                assert await client.submit(make_group(group_id, RUN, seed=1, env_id="env-2"), "env-2")
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


async def store_twenty_groups(url: str) -> list[str]:
    async with Client(url, patience=20) as client:
        await client.create_run(RUN, {"dataset": "d"}, 2)
        incarnation, _ = await client.take(RUN, trainer(groups=20), [])
        await client.record_version(RUN, PolicyVersion(incarnation, 0))
        ids = [permit.group_id for permit in (await client.permits(RUN, "env-1", 20, wait=0)).permits]
        for group_id in ids:
            assert await client.submit(make_group(group_id, RUN), "env-1")
    assert len(ids) == 20
    return ids


async def ready(url: str) -> list[str]:
    async with Client(url, patience=20) as client:
        return (await client.audit(RUN)).ready


async def test_redis_keeps_every_group_over_restarts(server: RedisServer) -> None:
    with ApiServer(server.api_url) as api:
        ids = await store_twenty_groups(api.url)
        for end in (server.kill, server.stop, server.kill):
            end()
            await asyncio.to_thread(server.start)
            assert await ready(api.url) == ids, end


async def test_redis_keeps_every_group_when_tokens_are_switched_on() -> None:
    """The file was written while each client had all rights, so it may hold writes that the API's user may not do."""
    server = RedisServer()
    secured, no_auth = server.users.read_text(), (ROOT / "compose/no-auth/users.acl").read_text()
    server.users.write_text(f"{no_auth}user {ADMIN} on >{ADMIN} ~* &* +@all\n")
    with server:
        with ApiServer(f"redis://127.0.0.1:{server.port}/0") as api:
            ids = await store_twenty_groups(api.url)
        with redis.Redis.from_url(server.url.replace("/0", "/3")) as other, other.pipeline(transaction=True) as pipe:
            pipe.set("of another program", "1").expire("of another program", 3600).xadd("stream", {"a": "b"}).execute()
        server.stop()
        server.users.write_text(secured)
        server.start()
        with ApiServer(server.api_url) as api:
            assert await ready(api.url) == ids
        with redis.Redis.from_url(server.url.replace("/0", "/3")) as other:
            assert (other.get("of another program"), other.xlen("stream")) == (b"1", 1)
            assert other.ttl("of another program") > 0


LOGINS = ["PING", "AUTH default default", "AUTH default", "AUTH x x", "HELLO 3 AUTH default x", "HELLO 3", "RESET"]


@pytest.mark.parametrize("login", LOGINS)
def test_redis_refuses_every_client_as_the_default_user(server: RedisServer, login: str) -> None:
    """The user has rights, which only the replay of the append-only file uses."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client, client.makefile("rwb", 0) as lines:
        for command in (login, "GET gm:runs", "SET gm:a 1", "FLUSHALL", "MULTI", "SELECT 1", "CONFIG GET *"):
            lines.write(command.encode() + b"\r\n")
            answer = lines.readline()
            assert answer.startswith((b"-NOAUTH", b"-WRONGPASS")) or command == "RESET", (command, answer)


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
            with pytest.raises(
                redis.exceptions.RedisError, match=r"(?i)no permission|can't run|can't access|ACL|not allowed"
            ):
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
