"""The real API in a separate process, started as docs/quickstart.md says."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import httpx
from tests.support.ports import free_port


class ApiServer:
    """`python -m gristmill_api` on a free port. `environ`: more variables, such as API_LEASE_TTL_S."""

    def __init__(
        self,
        redis_url: str,
        file_size: int | None = None,
        listener: socket.socket | None = None,
        descriptors: tuple[int, int] | None = None,
        /,
        *,
        host: str = "127.0.0.1",
        **environ: str,
    ) -> None:
        """`file_size`: no file may grow larger than this many bytes; writes beyond it fail, as on a full disk.

        `listener`: a listening socket that the server inherits. Clients that connect while the server is down wait
        there, as under systemd. `descriptors`: the soft and the hard limit of open files.
        """
        self._descriptors = descriptors
        self._host = host
        self._file_size = file_size
        self._listener = listener
        self.port: int = free_port() if listener is None else listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._environ = {**os.environ, "REDIS_URL": redis_url, **environ}
        self._directory = tempfile.TemporaryDirectory(prefix="gristmill-api-")
        self._log = Path(self._directory.name) / "api.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the API is not running"
        return self._process.pid

    def start(self) -> None:
        """Starts the server and waits until it answers. Redis may be unreachable."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gristmill_api"),
                    *self._at(),
                ],
                pass_fds=() if self._listener is None else (self._listener.fileno(),),
                env=self._environ,
                stdout=log,
                stderr=log,
                preexec_fn=self._bound,
            )
        deadline = time.monotonic() + 120  # On a loaded machine its imports alone can take half a minute.
        while True:
            try:
                httpx.get(f"{self.url}/healthz").raise_for_status()
                return
            except httpx.TransportError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the API did not start:\n{self.log()[-4000:]}") from error
                time.sleep(0.05)

    def _at(self) -> list[str]:
        if self._listener is not None:
            return ["--fd", str(self._listener.fileno())]
        return ["--host", self._host, "--port", str(self.port)]

    def _bound(self) -> None:
        if self._file_size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._file_size, self._file_size))
        if self._descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._descriptors)

    @property
    def peak_memory(self) -> int:
        """Returns the peak memory of the running process in bytes."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    def log(self) -> str:
        """Returns everything that the server has printed, over all starts."""
        return self._log.read_text()

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Sends the signal. Returns the seconds until the process exited."""
        started = time.monotonic()
        self._end(number)
        return time.monotonic() - started

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None

    def __enter__(self) -> ApiServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self._directory.cleanup()
