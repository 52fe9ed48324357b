"""atroposlib's own server, from its own virtual environment, with which tests compare our API."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import httpx
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-atropos" / "bin" / "python"

FRESH = "/__fresh__"
"""A POST here resets the server. All its state consists of attributes of one object, and a restart takes a second."""

_SERVER = f"""
import sys, uvicorn
from atroposlib.api.server import app

async def server(scope, receive, send):
    if scope["type"] == "http" and scope["path"] == "{FRESH}":
        app.state._state.clear()
        await send({{"type": "http.response.start", "status": 200, "headers": []}})
        await send({{"type": "http.response.body", "body": b""}})
    else:
        await app(scope, receive, send)

uvicorn.run(server, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


class AtroposReference:
    """The reference on a free port."""

    def __init__(self) -> None:
        assert PYTHON.exists(), f"no {PYTHON}: run `make dev`"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._directory = tempfile.TemporaryDirectory(prefix="atropos-reference-")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> AtroposReference:
        log = Path(self._directory.name) / "server.log"
        with log.open("wb") as out:
            self._process = subprocess.Popen([str(PYTHON), "-c", _SERVER, str(self.port)], stdout=out, stderr=out)
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(self.url).raise_for_status()
                return self
            except httpx.TransportError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"atroposlib's server did not start:\n{log.read_text()[-2000:]}") from error
                time.sleep(0.05)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(20)
        self._directory.cleanup()
