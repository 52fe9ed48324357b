"""A run whose trainer is the test: the test takes the run, labels the server's weights, and advances the version."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.api_server import ApiServer
from tests.support.redis_server import RedisServer
from tests.support.stack import Output, Vllm

from gristmill import GristmillError, PolicyVersion, SyncClient, TrajectoryGroup
from gristmill_cli.local.processes import LocalStack, Service
from gristmill_env.run_settings import RunSettings
from gristmill_env.serve import serve

TRAINER = {
    "batch_size": 4,
    "gradient_accumulation_steps": 1,
    "training_steps": 4,
    "max_staleness": 0,
    "publisher": "filesystem",
}
"""With groups of 2: two groups per step."""

RUN = """
group_size: 2
max_num_workers: 4
max_token_length: 64
ensure_scores_are_not_same: false
startup_patience: 30
dataset:
  dataset_path: sums.jsonl
  prompt_field: question
  answer_field: answer
  max_tokens: 8
  reward_functions:
    - {type: length, weight: 0.5, params: {target_tokens: 16}}
    - {type: format, weight: 0.25}
"""


@dataclass
class HandTrainer:
    """The trainer's calls, made one at a time."""

    api: SyncClient
    vllm: Vllm
    run_id: str
    incarnation: int = 0
    step: int = 0
    groups_per_step: int = 2
    trainer: dict[str, Any] = field(default_factory=lambda: dict(TRAINER))

    def take(self, label: str | None = None) -> None:
        """Takes the open run, and publishes its present step. It changes only the label; the weights stay the same."""
        assert self.api.open_run(120) is not None, "the environment did not open its run"
        self.incarnation, _ = self.api.take(self.run_id, self.trainer, [])
        self.publish(self.step, label)

    def publish(self, step: int, label: str | None = None) -> None:
        """Advances the run to `step`. `label`: the server's label instead, as if the server had lost the weights."""
        self.step = step
        self.label(label or str(PolicyVersion(self.incarnation, step)))
        self.api.record_version(self.run_id, PolicyVersion(self.incarnation, step))

    @property
    def url(self) -> str:
        return self.api.url

    def label(self, label: str) -> None:
        """Sets the server's weight label."""
        token = self.vllm.weights_dir / "token"
        if not token.exists():
            token.write_text(secrets.token_hex(32))
        headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
        url = f"{self.vllm.url}/update_weight_version"
        httpx.post(url, json={"new_version": label}, headers=headers, timeout=30).raise_for_status()

    def lease(self, wait: float = 60) -> list[TrajectoryGroup]:
        """Returns the step's groups."""
        amount = self.groups_per_step
        groups = self.api.lease(
            self.run_id, self.incarnation, f"b{self.incarnation}.{self.step + 1}", amount, wait=wait
        )
        assert groups is not None, "no groups came"
        return groups

    def train(self, until: int, label: str | None = None) -> list[TrajectoryGroup]:
        """Pretends to train up to step `until`, and publishes each step under its version or `label`. Returns all
        groups."""
        groups: list[TrajectoryGroup] = []
        while self.step < until:
            groups += self.lease()
            self.api.ack(self.run_id, self.incarnation, [f"b{self.incarnation}.{self.step + 1}"])
            self.publish(self.step + 1, label)
        return groups


class EnvThread:
    """`serve` on a thread, which starts as fast as its event loop. It ends when the run does, or is cancelled."""

    def __init__(self, launch: RunSettings) -> None:
        self.error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(serve(launch, {}))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout: float = 300) -> None:
        """Waits for the end. Raises the exception that `serve` raised."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "serve did not end"
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(30)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except (GristmillError, asyncio.CancelledError) as error:
            self.error = error
        finally:
            self._loop.close()


@dataclass
class Environments:
    """Starts environments on one configuration, in this process or in others."""

    folder: Path
    vllm: Vllm
    stack: LocalStack
    output: Output
    threads: list[EnvThread] = field(default_factory=list)

    def here(self, api_url: str, *flags: str) -> EnvThread:
        """Runs `serve` in this process. Only one may run at a time, because the process names the permits' holder."""
        self.threads.append(EnvThread(RunSettings.read(["--config", "sums", *flags], self._environ(api_url), "test")))
        return self.threads[-1]

    def process(self, api_url: str, *flags: str, name: str = "env") -> Service:
        """Starts `python -m gristmill_env`."""
        return self.program(api_url, ["-m", "gristmill_env"], *flags, name=name)

    def program(self, api_url: str, program: list[str], *flags: str, name: str) -> Service:
        """Starts Python with the arguments `program`, which runs `serve`."""
        command = [sys.executable, *program, "--config", "sums", *flags]
        return self.stack.start(name, command, self._environ(api_url))

    def ends(self, env: Service, timeout: float = 60) -> int:
        """Returns the process's exit code."""
        code = env.process.wait(timeout)
        env.reader.join(timeout=5)
        return code

    def _environ(self, api_url: str) -> dict[str, str]:
        return {
            "GRISTMILL_CONFIG_DIR": str(self.folder),
            "GRISTMILL_MODELS_DIR": str(self.vllm.models_dir),
            "GRISTMILL_MODEL_URL": self.vllm.url,
            "GRISTMILL_API_URL": api_url,
            "GRISTMILL_RUNS_DIR": str(self.folder / "runs"),
        }


@pytest.fixture
def environments(vllm: Vllm, tmp_path: Path) -> Iterator[Environments]:
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(RUN)
    output = Output()
    with LocalStack(output.add) as stack:
        environments = Environments(tmp_path, vllm, stack, output)
        yield environments
        for thread in environments.threads:
            thread.stop()


@pytest.fixture(scope="session")
def session_api(shared_redis: RedisServer) -> Iterator[ApiServer]:
    with ApiServer(shared_redis.api_url) as api:
        yield api


@pytest.fixture
def trainer(redis_url: str, session_api: ApiServer, vllm: Vllm) -> Iterator[HandTrainer]:
    """A trainer at an API that knows no run."""
    with SyncClient(session_api.url) as api:
        yield HandTrainer(api, vllm, "sums")
