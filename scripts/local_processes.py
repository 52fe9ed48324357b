"""Processes of a local stack: started, watched, their output merged, and all stopped again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType


class LocalStackError(Exception):
    """Something of the stack did not start, or ended too early."""


@dataclass
class Service:
    """A process of ours, the leader of its own process group."""

    name: str
    process: subprocess.Popen[bytes]
    reader: threading.Thread

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def stop(self, grace: float) -> None:
        """SIGTERM to the process, SIGKILL to its whole group after `grace` seconds."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                sys.stderr.write(f"{self.name} did not stop within {grace:.0f} s; killing it\n")
        # A server's workers are in its group and may outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join(timeout=5)


class LocalStack:
    """A context that starts services in order and stops them in reverse order."""

    def __init__(self, say: Callable[[str, str], None] | None = None) -> None:
        """`say(name, line)` gets every line of output; by default it is printed, marked with the service's name."""
        self._say = say or _print_line
        self._services: list[Service] = []

    def start(self, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Service:
        """Start a process with `environ` on top of this one's environment."""
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which stops the rest in order.
        )
        reader = threading.Thread(target=self._read, args=(name, process), daemon=True)
        service = Service(name, process, reader)
        self._services.append(service)
        reader.start()
        return service

    def wait_until(self, service: Service, ready: Callable[[], bool], timeout: float) -> None:
        """Wait until `ready()`. Raises LocalStackError when the process ends before, or time runs out."""
        deadline = time.monotonic() + timeout
        while True:
            ended = service.exit_code  # asked first: a process may be ready by ending
            if ready():
                return
            if ended is not None:
                raise LocalStackError(f"{service.name} ended with exit code {ended}; its lines above say why")
            if time.monotonic() > deadline:
                raise LocalStackError(f"{service.name} was not ready after {timeout:.0f} s")
            time.sleep(0.2)

    def stop(self, grace: float = 20.0) -> None:
        while self._services:
            self._services.pop().stop(grace)

    def __enter__(self) -> LocalStack:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _read(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            self._say(name, raw.decode(errors="replace").rstrip("\n"))


def _print_line(name: str, text: str) -> None:
    sys.stdout.write(f"{name:<7} | {text}\n")
    sys.stdout.flush()


def answers(url: str) -> bool:
    """True when a GET of `url` is answered with 2xx."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            status: int = answer.status
            return 200 <= status < 300
    except (urllib.error.URLError, OSError):
        return False


def listens(port: int) -> bool:
    """True when something on loopback accepts connections on `port`."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
