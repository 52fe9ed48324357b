"""The services for measurements of whole runs: real Redis, trajectory API and vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.stack import MODELS_DIR, environ, start_api, start_redis, start_vllm

from gristmill_cli.local.processes import LocalStack, free_port


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
def start_services(folder: Path, model: str, **api: str) -> Iterator[Services]:
    """Starts the services, and stops them at the end of the block. The output of all processes goes to a file in
    `folder`. `api`: more variables of the API, such as GRISTMILL_RUNS_DIR for an archive."""
    folder.mkdir()
    with (folder / "output.log").open("w") as log:

        def say(name: str, text: str) -> None:
            print(f"{name} | {text}", file=log, flush=True)

        weights = folder / "weights"
        weights.mkdir()
        with LocalStack(say) as processes:
            redis_port, api_port, model_port = free_port(), free_port(), free_port()
            start_redis(processes, folder / "redis", redis_port)
            start_api(processes, redis_port, api_port, **api)
            start_vllm(processes, weights, model_port, model)
            api_url, model_url = f"http://127.0.0.1:{api_port}", f"http://127.0.0.1:{model_port}"
            yield Services(processes, folder, api_url, model_url, weights)
