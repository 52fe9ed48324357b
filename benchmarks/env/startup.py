"""Measures the time from the model server's readiness to the first prompt, and the memory of a worker.

The environment starts before it can reach the server. A gate in front of the server opens after a while, like a model
server that has finished loading. The measured time starts when the gate opens and ends with the first prompt.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.env.stack import Bench

from gristmill_cli.local.processes import free_port

_ROWS = 10_000
_CLOSED_S = 25.0
_WORK_S = 10.0
_NAME = "gristmill-bench-env"


@dataclass(frozen=True)
class Startup:
    """One start on a data set of 10,000 rows."""

    first_prompt_s: float
    """Seconds from the gate's opening to the first prompt."""


@dataclass
class _Gate:
    """Passes connections on to the model server after `open`."""

    target: str
    port: int = field(default_factory=free_port)
    opened: float = 0.0
    first_prompt: float | None = None

    def open(self) -> None:
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        while not self.opened:
            time.sleep(0.001)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self.opened = time.monotonic()
        await server.serve_forever()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at = urlsplit(self.target)
        there, back = await asyncio.open_connection(at.hostname, at.port)
        await asyncio.gather(self._pass(reader, back, watch=True), self._pass(there, writer, watch=False))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, watch: bool) -> None:
        while data := await reader.read(1 << 16):
            # Head and body may arrive separately. The request that checks for the route contains no token ids.
            if watch and self.first_prompt is None and b'"token_ids":[' in data:
                self.first_prompt = time.monotonic()
            writer.write(data)
        writer.close()


def first_prompt(bench: Bench, number: int) -> Startup:
    """Measures one start."""
    run, gate = f"startup-{number}", _Gate(bench.model_url)
    bench.config(run, _ROWS)
    env = bench.serve(run, f"http://127.0.0.1:{gate.port}")
    time.sleep(_CLOSED_S)
    trainer = threading.Thread(target=bench.take, args=(run,))
    trainer.start()
    gate.open()
    while gate.first_prompt is None:
        assert env.exit_code is None, "serve ended"
        time.sleep(0.001)
    trainer.join()
    env.stop(grace=20)
    bench.close(run)
    return Startup(gate.first_prompt - gate.opened)


def resident_mb(bench: Bench, image: str) -> float:
    """Returns the peak resident megabytes (10^6 bytes) of a worker with 10,000 rows in the environment's image.

    The image contains no torch.
    """
    run = "memory"
    bench.config(run, _ROWS)
    (bench.folder / "runs").mkdir(exist_ok=True)
    for path in (bench.folder, *bench.folder.glob("*")):
        path.chmod(0o777 if path.is_dir() else 0o644)
    volumes = [f"{path}:{path}" for path in (bench.folder, bench.models_dir)]
    flags = [word for volume in volumes for word in ("-v", volume)]
    flags += [word for name, value in bench.environ().items() for word in ("-e", f"{name}={value}")]
    start = ["docker", "run", "--detach", "--rm", "--network", "host", "--name", _NAME, *flags, image]
    subprocess.run([*start, "serve", "--config", run], check=True, capture_output=True)
    try:
        bench.take(run)
        time.sleep(_WORK_S)
        inspected = ["docker", "inspect", "--format", "{{.State.Pid}}", _NAME]
        pid = subprocess.run(inspected, check=True, capture_output=True, text=True).stdout.strip()
        status = Path(f"/proc/{pid}/status").read_text()
    finally:
        subprocess.run(["docker", "stop", _NAME], check=False, capture_output=True)
        bench.close(run)
    match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024 / 1e6
