"""A real redis-server for tests, as durable as the stack's server: append-only file, fsync before every answer."""

from __future__ import annotations

import resource
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import redis
from tests.support.ports import free_port

from gristmill_cli.local.redis_acl import USER, users_acl
from gristmill_cli.local.redis_server import redis_command

MEMORY = 4 << 30
"""Bytes of address space for a test's Redis. Without a limit, a script that never ends would exhaust the machine."""


PASSWORD = "of-the-api"
ADMIN = "tests"
"""User with all rights, and its password. Tests read and change the store as this user."""


def admin_url(port: int) -> str:
    return f"redis://{ADMIN}:{ADMIN}@127.0.0.1:{port}/0"


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # A test that limits the size of its files needs write(2) to fail, as on a full disk, without a signal.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


class RedisServer:
    """A server on a separate port and directory. `kill` is SIGKILL; `start` reads the data on disk again.

    Its users are the users of the file that `make secure` writes, and one more user for the tests.
    """

    def __init__(self, *options: str) -> None:
        """`options` override the defaults: RedisServer("--appendfsync", "everysec")."""
        self.port = free_port()
        self.url = admin_url(self.port)
        self.api_url = f"redis://{USER}:{PASSWORD}@127.0.0.1:{self.port}/0"
        """The URL for the API, whose user has only the rights that the API needs (`local.redis_acl`). `url` has all
        rights."""
        self._directory = tempfile.TemporaryDirectory(prefix="gristmill-redis-")
        self.users = Path(self._directory.name) / "users.acl"
        self.users.write_text(f"{users_acl(PASSWORD)}user {ADMIN} on >{ADMIN} ~* &* +@all\n")
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """The server's data, unless an option says otherwise."""
        return Path(self._directory.name)

    def wait_until_ended(self) -> None:
        """Returns once the server has ended without a signal; `start` starts it again. Raises subprocess.TimeoutExpired
        if it does not end."""
        assert self._process is not None
        self._process.wait(20)

    @property
    def pid(self) -> int:
        assert self._process is not None, "redis-server is not running"
        return self._process.pid

    def start(self) -> None:
        """Starts the server and waits until it has loaded its file and answers."""
        log = self.folder / "redis.log"
        self._process = subprocess.Popen(
            [
                *redis_command(self.port, self.folder),
                *("--aclfile", str(self.users), "--logfile", str(log), *self._options),
            ],
            stdout=subprocess.DEVNULL,
            preexec_fn=_bounded,
        )
        with redis.Redis.from_url(self.url) as client:
            deadline = time.monotonic() + 20
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError as error:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"redis-server did not start:\n{log.read_text()[-2000:]}") from error
                    time.sleep(0.02)

    def refused(self) -> set[str]:
        """Returns the commands, keys and channels that were denied to the API's user, from Redis' log."""
        with redis.Redis.from_url(self.url) as client:
            return {str(entry["object"]) for entry in client.acl_log()}

    def kill(self) -> None:
        """Sends SIGKILL, as the kernel does when memory runs out."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Sends SIGSTOP: connections stay open and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:  # a script that never ends
                self._process.kill()
                raise
            finally:
                self._process = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self._directory.cleanup()
