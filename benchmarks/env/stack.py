"""A run for measuring: real Redis, API and vLLM, and a trainer that takes the run but trains nothing."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from benchmarks.services import Services, start_services

from gristmill import PolicyVersion, SyncClient
from gristmill_cli.local.processes import Service

_AHEAD = 100_000
"""Steps that generation may run ahead. The number is so high that no environment ever waits for a permit."""


@dataclass(frozen=True)
class Load:
    """The load on a model: `workers` prompts at a time, each with `group_size` completions."""

    model: str
    workers: int
    max_tokens: int
    """Maximum tokens of a completion."""
    group_size: int = 8


@dataclass(frozen=True)
class Bench(Services):
    """The services that a measurement's environments use."""

    load: Load = field(kw_only=True)

    def config(self, name: str, rows: int) -> None:
        """Writes a configuration and its data set of sums."""
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
        """Starts `gristmill-env serve` as a process."""
        command = [sys.executable, "-m", "gristmill_env", "serve", "--config", name]
        environ = self.environ() | ({} if model_url is None else {"GRISTMILL_MODEL_URL": model_url})
        return self.processes.start(f"env-{name}", command, environ)

    def take(self, name: str) -> str:
        """Takes the run `name` as its trainer as soon as the run is open. Returns the version of the weights."""
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
            return str(version)

    def close(self, name: str) -> None:
        """Ends the run `name`."""
        with SyncClient(self.api_url) as api:
            api.close_run(name)


@contextmanager
def bench(folder: Path, load: Load, stub: Mapping[str, str] | None = None, **api: str) -> Iterator[Bench]:
    """Starts the services with the model of `load`. `stub`, `api`: as for `start_services`."""
    with start_services(folder, load.model, stub, **api) as started:
        yield Bench(**vars(started), load=load)
