"""A Redis outside the stack: over TLS with a password, and behind Sentinels. docs/clusters.md describes both."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from redis.exceptions import ConnectionError  # noqa: A004
from tests.support.api_server import ApiServer
from tests.support.ledger import Ledger
from tests.support.ports import free_port
from tests.support.redis_sentinels import SENTINEL_LOGIN, SERVICE, Sentinels, certificate, program_with_tls
from tests.support.redis_server import PASSWORD, RedisServer
from tests.support.scripted_env import serve
from tests.support.scripted_run import ENV, GROUP_SIZE
from tests.support.scripted_trainer import Checkpoint, train

from gristmill import Client, GroupAudit
from gristmill_api.redis_url import redis_options
from gristmill_api.store.connection import ask, connect, wait_replicas
from gristmill_cli.local.redis_server import redis_server

RUN = "run-1"
STEPS = 30


async def trained_run(url: str, folder: Path, at_half: asyncio.Event | None = None) -> Ledger:
    """Trains a run over the API, and returns where its groups are. `at_half`: set at half of the steps."""
    acknowledged: list[str] = []
    checkpoint = folder / "checkpoint.json"

    async def watch() -> None:
        while at_half is not None and not at_half.is_set():
            await asyncio.sleep(0.02)
            if Checkpoint.load(checkpoint).step >= STEPS // 2:
                at_half.set()

    async with Client(url, patience=90, timeout=10) as client:
        await client.create_run(RUN, ENV, GROUP_SIZE)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(client, RUN, "env-1", acknowledged.append))
            tasks.create_task(watch())
            await train(client, RUN, checkpoint, STEPS)
        audit: GroupAudit = await client.audit(RUN)
    return Ledger.of(acknowledged, Checkpoint.load(checkpoint).trained, audit)


class Tls:
    """A server with a certificate, and one Sentinel with the same certificate, which starts on request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.signed, self.key = certificate(folder / "server")
        self.stranger, _ = certificate(folder / "stranger")
        self.port = free_port()
        self.password = folder / "password"
        self.password.write_text(PASSWORD)
        files = ("--tls-cert-file", str(self.signed), "--tls-key-file", str(self.key), "--tls-auth-clients", "no")
        self.server = RedisServer("--tls-port", str(self.port), *files)

    def url(self, authority: Path) -> str:
        return f"rediss://127.0.0.1:{self.port}/0?ssl_ca_certs={authority}"

    @contextlib.contextmanager
    def sentinel(self) -> Iterator[str]:
        """Yields the URL of the server by the Sentinel, without the certificate's issuer."""
        port, file = free_port(), self.folder / "sentinel.conf"
        file.write_text(
            f"port 0\nbind 127.0.0.1\ndir {self.folder}\ntls-port {port}\ntls-replication yes\ntls-auth-clients no\n"
            f"tls-cert-file {self.signed}\ntls-key-file {self.key}\ntls-ca-cert-file {self.signed}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.port} 1\n{SENTINEL_LOGIN}"
        )
        process = subprocess.Popen([str(redis_server()), str(file), "--sentinel"])
        try:
            yield f"rediss+sentinel://127.0.0.1:{port}/{SERVICE}"
        finally:
            process.kill()
            process.wait(20)


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tls]:
    monkeypatch.setenv("REDIS_SERVER", program_with_tls(tmp_path))
    found = Tls(tmp_path)
    with found.server:
        yield found


async def test_run_trains_over_tls_with_a_password(tls: Tls, tmp_path: Path) -> None:
    with ApiServer(tls.url(tls.signed), REDIS_PASSWORD_FILE=str(tls.password)) as api:
        ledger = await trained_run(api.url, tmp_path)
        assert ledger.problems() == {}
        assert PASSWORD not in api.log()
    assert tls.server.refused() <= {"client|setinfo", "config|get"}


async def test_sentinel_and_server_answer_over_tls_if_the_system_trusts_the_certificate(tls: Tls) -> None:
    login = {"REDIS_PASSWORD_FILE": str(tls.password)}
    with tls.sentinel() as url, ApiServer(url, SSL_CERT_FILE=str(tls.signed), **login) as api:
        async with httpx.AsyncClient() as http:
            while (answer := await http.get(f"{api.url}/readyz", timeout=30)).status_code == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # The Sentinel names the server once it has reached it.
        assert answer.status_code == 200


@pytest.mark.parametrize("wrong", ["certificate", "password"])
async def test_api_is_not_ready_with_a_wrong_certificate_or_password(tls: Tls, wrong: str) -> None:
    if wrong == "password":
        tls.password.write_text("another")
    authority = tls.stranger if wrong == "certificate" else tls.signed
    with ApiServer(tls.url(authority), REDIS_PASSWORD_FILE=str(tls.password)) as api:
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"{api.url}/readyz", timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert PASSWORD not in api.log()


@pytest.mark.long
async def test_failover_loses_no_acknowledged_group_if_writes_wait_for_the_replica(tmp_path: Path) -> None:
    with Sentinels() as sentinels, ApiServer(sentinels.url("wait_replicas=1")) as api:
        half = asyncio.Event()
        training = asyncio.create_task(trained_run(api.url, tmp_path, half))
        await half.wait()
        assert sentinels.master() is sentinels.one
        sentinels.one.kill()
        while sentinels.master() is not sentinels.other:  # noqa: ASYNC110  the test's time-out is the bound
            await asyncio.sleep(0.1)
        sentinels.one.start()  # No write is acknowledged before a replica has received it.
        ledger = await training
        assert ledger.problems() == {}
        assert sentinels.master() is sentinels.other
        sentinels.wait_for_replica(sentinels.one)


@pytest.mark.long
async def test_a_repeated_call_waits_for_the_replica_too() -> None:
    """The repetition writes nothing, and may use another connection than the call whose write the replica lacks."""
    body = {"run_id": RUN, "env": {}, "group_size": 2}
    with Sentinels() as sentinels, ApiServer(sentinels.url("wait_replicas=1")) as api:
        sentinels.other.pause()
        async with httpx.AsyncClient(base_url=api.url, timeout=30) as http:
            refused = await asyncio.gather(*(http.post("/v1/runs", json=body) for _ in range(3)))
            refused.append(await http.post("/v1/runs", json=body))
            sentinels.other.resume()
            assert {answer.status_code for answer in refused} == {503}
            while (answer := await http.post("/v1/runs", json=body)).status_code == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert answer.is_success


async def test_connection_to_a_master_that_became_a_replica_is_closed() -> None:
    """An administrator's REPLICAOF keeps connections open."""
    with Sentinels() as sentinels:
        async with connect(sentinels.url("max_connections=1"), {}) as client:
            assert await client.set("gm:a", "1")
            with redis.Redis.from_url(sentinels.one.url) as admin:
                admin.replicaof("127.0.0.1", str(sentinels.other.port))
            connection = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
            with pytest.raises(ConnectionError):
                await ask(connection, [("SET", "gm:a", "2")])
            assert not connection.is_connected
            await client.connection_pool.release(connection)


async def test_a_write_that_too_few_replicas_received_is_not_acknowledged(redis_url: str) -> None:
    with ApiServer(f"{redis_url}?wait_replicas=1") as api:
        async with httpx.AsyncClient() as http:
            body = {"run_id": RUN, "env": {}, "group_size": 2}
            answer = await http.post(f"{api.url}/v1/runs", json=body, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")


async def test_a_master_that_refuses_writes_without_a_replica_is_unavailable() -> None:
    with RedisServer("--min-replicas-to-write", "1") as server, ApiServer(server.url) as api:
        async with httpx.AsyncClient() as http:
            body = {"run_id": RUN, "env": {}, "group_size": 2}
            answer = await http.post(f"{api.url}/v1/runs", json=body, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")


def test_options_of_sentinels() -> None:
    url = "redis+sentinel://api:s3cret@one,two:7000/main?db=1&wait_replicas=2"
    assert redis_options(url) == {
        "username": "api",
        "password": "s3cret",
        "sentinels": (("one", 26379), ("two", 7000)),
        "service": "main",
        "db": 1,
        "wait_replicas": 2,
    }
    assert wait_replicas(connect(url, {})) == 2
