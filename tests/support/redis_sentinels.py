"""A master, a replica and three Sentinels on loopback; and a redis-server that supports TLS, with a certificate."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import pytest
import redis
from tests.support.ports import free_port
from tests.support.redis_server import ADMIN, RedisServer

from gristmill_cli.local.redis_server import redis_server

SERVICE = "mymaster"
SENTINEL_LOGIN = f"sentinel auth-user {SERVICE} {ADMIN}\nsentinel auth-pass {SERVICE} {ADMIN}\n"
"""Lines of a Sentinel's file. The user `default` of its servers is off."""
_DOWN_AFTER_MS = 500
_DEBIANS = "/usr/bin/redis-check-rdb"
"""Debian's package redis-tools has the server under this name. Its package redis-server adds a link and a service."""


class Sentinels:
    """`master` may be killed: the Sentinels then make the other server the master. A server that starts again becomes a
    replica."""

    def __init__(self) -> None:
        login = ("--masteruser", ADMIN, "--masterauth", ADMIN)
        self.one = RedisServer(*login)
        self.other = RedisServer(*login, "--replicaof", "127.0.0.1", str(self.one.port))
        self._ports = [free_port() for _ in range(3)]
        self._directory = tempfile.TemporaryDirectory(prefix="gristmill-sentinel-")
        self._processes: list[subprocess.Popen[bytes]] = []

    def url(self, options: str = "") -> str:
        """Returns REDIS_URL for the API."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"redis+sentinel://{ADMIN}:{ADMIN}@{hosts}/{SERVICE}?{options}"

    def master(self) -> RedisServer:
        """Returns the server that the Sentinels name."""
        with redis.Redis(port=self._ports[0]) as sentinel:
            found = sentinel.sentinel_get_master_addr_by_name(SERVICE)
        assert found is not None
        return self.one if found[1] == self.one.port else self.other

    def wait_for_replica(self, server: RedisServer) -> None:
        """Returns once the server is a replica with all data of its master."""
        deadline = time.monotonic() + 60
        while True:
            with redis.Redis.from_url(server.url) as client:
                facts = client.info("replication")
            if facts["role"] == "slave" and facts["master_link_status"] == "up":
                return
            assert time.monotonic() < deadline, facts
            time.sleep(0.1)

    def __enter__(self) -> Sentinels:
        self.one.start()
        self.other.start()
        self.wait_for_replica(self.other)
        for port in self._ports:
            file = Path(self._directory.name) / f"{port}.conf"
            file.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {self._directory.name}\nlogfile {file.with_suffix('.log')}\n"
                f"sentinel monitor {SERVICE} 127.0.0.1 {self.one.port} 2\n{SENTINEL_LOGIN}"
                f"sentinel down-after-milliseconds {SERVICE} {_DOWN_AFTER_MS}\n"
                f"sentinel failover-timeout {SERVICE} 5000\n"
            )
            self._processes.append(subprocess.Popen([str(redis_server()), str(file), "--sentinel"]))
        self._wait_until_they_know_each_other()
        return self

    def _wait_until_they_know_each_other(self) -> None:
        deadline = time.monotonic() + 60
        for port in self._ports:
            while True:
                assert time.monotonic() < deadline, "the Sentinels did not find each other"
                try:
                    with redis.Redis(port=port) as sentinel:
                        facts = sentinel.sentinel_master(SERVICE)
                except redis.ConnectionError:
                    facts = {}
                if facts.get("num-other-sentinels") == 2 and facts.get("num-slaves") == 1:
                    break
                time.sleep(0.1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait(20)
        self.one.kill()
        self.other.kill()
        self._directory.cleanup()


def program_with_tls(folder: Path) -> str:
    """Returns a redis-server that supports TLS. Skips the test without such a server, and fails it in CI."""
    link = folder / "redis-server"
    if Path(_DEBIANS).exists():
        link.symlink_to(_DEBIANS)
    for program in (str(redis_server()), *([str(link)] if link.exists() else [])):
        # Without a certificate, a server that supports TLS ends with another message.
        ended = subprocess.run(
            [program, "--port", "0", "--tls-port", str(free_port()), "--dir", str(folder)],
            capture_output=True,
            timeout=20,
        )
        if b"Failed finding TLS support" not in ended.stdout:
            return program
    missing = "no redis-server with TLS: run scripts/prepare_package.sh redis-tools"
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


def certificate(folder: Path) -> tuple[Path, Path]:
    """Makes a certificate for 127.0.0.1 that signs itself. Returns the files of certificate and key."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "no openssl"
    folder.mkdir()
    signed, key = folder / "server.pem", folder / "server.key"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", "/CN=redis", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(signed)),
        ],
        check=True,
        capture_output=True,
    )
    return signed, key
