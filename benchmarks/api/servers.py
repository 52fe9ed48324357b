"""The servers under test, as their users start them: one uvicorn process on loopback with its log in a file."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from gristmill_cli.local.processes import free_port

LIMITS = {"API_PERMIT_TTL_S": "3600", "API_LEASE_TTL_S": "3600"}
"""Limits so long that no permit or lease expires during a case, even on a slow machine."""


class Uvicorn:
    """`python -m uvicorn <app>` on a free port."""

    def __init__(self, python: Path, app: str, ready: str, environ: Mapping[str, str]) -> None:
        """`ready`: a path that answers as soon as the server is ready."""
        self.port = free_port()
        self._command: Sequence[str] = [
            *(str(python), "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", str(self.port)),
        ]
        self._ready = ready
        self._environ = {**os.environ, **environ}
        self._folder = tempfile.TemporaryDirectory(prefix="gristmill-bench-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def __enter__(self) -> Uvicorn:
        log = Path(self._folder.name) / "log"
        with log.open("wb") as file:
            self._process = subprocess.Popen(self._command, env=self._environ, stdout=file, stderr=file)
        deadline = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(self._command)} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
        self._folder.cleanup()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", self._ready)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def reference(python: Path) -> Uvicorn:
    """Returns atroposlib's server, as atroposlib's `run-api` starts it."""
    if not python.exists():
        raise SystemExit(f"{python} does not exist: run `make dev`, or name another one with --atropos-python")
    # Gristmill's sources must not come before the packages of atroposlib's environment.
    return Uvicorn(python, "atroposlib.api:app", "/", {"PYTHONPATH": ""})


def gristmill(redis_url: str) -> Uvicorn:
    """Returns Gristmill's API, as the README and the API's image start it."""
    return Uvicorn(Path(sys.executable), "gristmill_api.app:app", "/readyz", {"REDIS_URL": redis_url, **LIMITS})
