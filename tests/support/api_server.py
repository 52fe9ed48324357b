"""The real API in a separate process."""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import os
import resource
import signal
import socket
import tempfile
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.ports import free_port

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.support.api_process"])


def _run(*arguments: Any) -> None:
    from tests.support import api_process  # The forks have it. This process does not need it.

    api_process.run(*arguments)


class ApiServer:
    """The API on a free port, as `python -m gristmill_api` starts it.

    `environ`: more variables, such as API_LEASE_TTL_S.
    """

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
        self._process: ForkServerProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the API is not running"
        assert self._process.pid is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the server and waits until it answers. Redis may be unreachable."""
        self._log.touch()
        arguments = [] if self._listener else ["--host", self._host, "--port", str(self.port)]
        bounds = {}
        if self._file_size is not None:
            bounds[resource.RLIMIT_FSIZE] = (self._file_size, self._file_size)
        if self._descriptors is not None:
            bounds[resource.RLIMIT_NOFILE] = self._descriptors
        self._process = _FORKS.Process(target=_run, args=(arguments, self._environ, self._log, bounds, self._listener))
        self._process.start()
        deadline = time.monotonic() + 120  # On a loaded machine its imports alone can take half a minute.
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port)
                connection.request("GET", "/healthz")
                assert connection.getresponse().status == 200
                connection.close()
                return
            except (OSError, http.client.HTTPException) as error:
                if not self._process.is_alive() or time.monotonic() > deadline:
                    raise RuntimeError(f"the API did not start:\n{self.log()[-4000:]}") from error
                time.sleep(0.05)

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
            with contextlib.suppress(ProcessLookupError):  # It has ended by itself.
                os.kill(self.pid, number)
            self._process.join(30)
            assert not self._process.is_alive(), f"the API runs 30 s after {number.name}:\n{self.log()[-4000:]}"
            self._process = None

    def __enter__(self) -> ApiServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self._directory.cleanup()
