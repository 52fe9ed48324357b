"""A run for measuring: real Redis, API and vLLM, and a trainer that asks for everything and trains nothing."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.support.stack import MODELS_DIR, start_api, start_redis, start_vllm

from gristmill import PolicyVersion, SyncClient
from local_processes import LocalStack, Service, free_port

_AHEAD = 100_000
"""Steps that generation may run ahead: no permit is ever waited for."""


@dataclass(frozen=True)
class Load:
    """What is asked of a model: `workers` prompts at a time, each for `group_size` completions."""

    model: str
    workers: int
    max_tokens: int
    """Of a completion, at most."""
    group_size: int = 8


@dataclass(frozen=True)
class Bench:
    """What a measurement starts environments against."""

    load: Load
    processes: LocalStack
    folder: Path
    api_url: str
    model_url: str
    models_dir: Path
    weights_dir: Path

    def config(self, name: str, rows: int) -> None:
        """Write a configuration and its data set of sums."""
        sums = ({"question": f"What is {n % 90} + {n % 9}?", "answer": f"#### {n % 90 + n % 9}"} for n in range(rows))
        (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
        (self.folder / f"{name}.yaml").write_text(
            f"group_size: {self.load.group_size}\nmax_num_workers: {self.load.workers}\nmax_token_length: 128\n"
            "ensure_scores_are_not_same: false\n"
            f"dataset:\n  dataset_path: {name}.jsonl\n  prompt_field: question\n  answer_field: answer\n"
            f"  max_tokens: {self.load.max_tokens}\n"
            "  reward_functions: [{type: format, weight: 0.2}, {type: accuracy, weight: 0.8}]\n"
        )

    def serve(self, name: str, model_url: str | None = None) -> Service:
        """`gristmill-env serve` as a process."""
        command = [sys.executable, "-m", "gristmill_env", "serve", "--config", name]
        return self.processes.start(f"env-{name}", command, self.environ(model_url))

    def environ(self, model_url: str | None = None) -> dict[str, str]:
        """Where everything is."""
        return {
            "GRISTMILL_CONFIG_DIR": str(self.folder),
            "GRISTMILL_MODELS_DIR": str(self.models_dir),
            "GRISTMILL_MODEL_URL": model_url or self.model_url,
            "GRISTMILL_API_URL": self.api_url,
            "GRISTMILL_RUNS_DIR": str(self.folder / "runs"),
        }

    def take(self, name: str) -> None:
        """Be the trainer of the run `name`, once it is open."""
        with SyncClient(self.api_url) as api:
            assert api.open_run(60) is not None, "the environment did not open its run"
            settings = {"batch_size": 128, "gradient_accumulation_steps": 1, "training_steps": 10**6}
            incarnation, _ = api.take(name, {**settings, "max_staleness": _AHEAD, "publisher": "filesystem"}, [])
            version = PolicyVersion(incarnation, 0)
            token = self.weights_dir / "token"
            if not token.exists():
                token.write_text(secrets.token_hex(32))
            headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
            body = {"new_version": str(version)}
            httpx.post(f"{self.model_url}/update_weight_version", json=body, headers=headers).raise_for_status()
            api.record_version(name, version)

    def close(self, name: str) -> None:
        """End the run `name`."""
        with SyncClient(self.api_url) as api:
            api.close_run(name)


@contextmanager
def bench(folder: Path, load: Load) -> Iterator[Bench]:
    """All parts, started and stopped; their output goes to a file in `folder`."""
    folder.mkdir()
    with (folder / "output.log").open("w") as log:

        def say(name: str, text: str) -> None:
            print(f"{name} | {text}", file=log, flush=True)

        weights = folder / "weights"
        weights.mkdir()
        with LocalStack(say) as processes:
            redis_port, api_port, model_port = free_port(), free_port(), free_port()
            start_redis(processes, folder / "redis", redis_port)
            start_api(processes, redis_port, api_port)
            start_vllm(processes, weights, model_port, load.model)
            yield Bench(
                load,
                processes,
                folder,
                f"http://127.0.0.1:{api_port}",
                f"http://127.0.0.1:{model_port}",
                MODELS_DIR,
                weights,
            )
