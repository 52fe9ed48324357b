"""The services for measurements of whole runs: real Redis, trajectory API and vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.stack import MODELS_DIR, environ, start_api, start_redis, start_vllm

from gristmill_cli.local.processes import LocalStack, Service, answers, free_port


@dataclass(frozen=True)
class Services:
    """The running processes, and their folders and URLs."""

    processes: LocalStack
    folder: Path
    """Folder with configurations, runs and output.log."""
    api_url: str
    model_url: str
    weights_dir: Path
    models_dir: Path = MODELS_DIR

    def environ(self) -> dict[str, str]:
        """Returns the variables that point an environment or a trainer to the services and folders."""
        return environ(self.api_url, self.model_url, self.folder / "runs", self.folder, self.weights_dir)


@contextmanager
def local_stack(folder: Path) -> Iterator[LocalStack]:
    """Yields a stack without processes. The output of its processes goes to a file in `folder`."""
    with (
        (folder / "output.log").open("w") as log,
        LocalStack(lambda name, text: print(f"{name} | {text}", file=log, flush=True)) as processes,
    ):
        yield processes


def start_stub(processes: LocalStack, port: int, environ: Mapping[str, str]) -> Service:
    """Starts the replacement of the model server. `environ`: variables of benchmarks/stub_model_server.py."""
    command = [sys.executable, "-m", "uvicorn", "benchmarks.stub_model_server:app", "--port", str(port)]
    stub = processes.start("model", [*command, "--log-level", "warning"], environ)
    processes.wait_until(stub, lambda: answers(f"http://127.0.0.1:{port}/health"), timeout=60)
    return stub


@contextmanager
def start_services(folder: Path, model: str, stub: Mapping[str, str] | None = None, **api: str) -> Iterator[Services]:
    """Starts the services, and stops them at the end of the block. The output of all processes goes to a file in
    `folder`. `stub`: its variables, if the stub replaces vLLM. `api`: more variables of the API, such as
    GRISTMILL_RUNS_DIR for an archive."""
    weights = folder / "weights"
    weights.mkdir(parents=True)
    with local_stack(folder) as processes:
        redis_port, api_port, model_port = free_port(), free_port(), free_port()
        start_redis(processes, folder / "redis", redis_port)
        start_api(processes, redis_port, api_port, **api)
        if stub is None:
            start_vllm(processes, weights, model_port, model)
        else:
            start_stub(processes, model_port, stub)
        api_url, model_url = f"http://127.0.0.1:{api_port}", f"http://127.0.0.1:{model_port}"
        yield Services(processes, folder, api_url, model_url, weights)
