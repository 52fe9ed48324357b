"""A short quickstart on real services whose trainer is killed between two checkpoints, as the input of `gristmill
retrain`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from tests.support.ports import free_port
from tests.support.stack import ROOT, Output, Vllm, start_api, start_redis

from gristmill import read_rollouts
from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack, Service

RUN = "quickstart"
STEPS = 6
EVERY = 2
"""Steps between two checkpoints. The run keeps the last two checkpoints only."""
GROUPS = 4
_STEP_SECONDS = 900.0
"""Longest time between two kills; long enough for a model of 135M parameters on two cores."""
KILLED_AFTER = (3, 5)
"""The trainer is killed when it has reported these steps, of which no checkpoint exists."""


def record(vllm: Vllm, folder: Path, **trainer: Any) -> Path:
    """Trains a quickstart of `STEPS` steps, with kills. Returns the run's folder.

    `trainer`: more settings of the run.
    """
    settings = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    dataset = settings["dataset"]
    dataset["dataset_path"] = str(ROOT / "configs" / dataset["dataset_path"])
    settings["steps_per_eval"] = 0
    settings["trainer"] |= {
        "training_steps": STEPS,
        "batch_size": 4 * GROUPS,
        "gradient_accumulation_steps": 2,
        "checkpoint_interval": EVERY,
    } | trainer
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{RUN}.yaml").write_text(yaml.safe_dump(settings))
    runs = folder / "runs"
    rows = runs / RUN / "metrics.jsonl"
    with LocalStack(Output().add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, folder / "redis", redis_port)
        start_api(stack, redis_port, api_port, GRISTMILL_RUNS_DIR=str(runs))
        environ = vllm.environ(f"http://127.0.0.1:{api_port}", runs, folder)
        # Another number than in the tests' processes, which retrain the run (tests/conftest.py).
        environ["OMP_NUM_THREADS"] = "2"

        def start() -> Service:
            return stack.start("trainer", [sys.executable, "-m", "gristmill_trainer"], environ)

        trainer_process = start()
        env = stack.start("env", [sys.executable, "-m", "gristmill_env", "serve", "--config", RUN], environ)
        for step in KILLED_AFTER:
            stack.wait_until(trainer_process, lambda step=step: _reported(rows, step), timeout=_STEP_SECONDS)  # type: ignore[misc]
            trainer_process.process.kill()
            trainer_process.process.wait()
            trainer_process = start()
        stack.wait_until(trainer_process, lambda: trainer_process.exit_code == 0, timeout=_STEP_SECONDS)
        stack.wait_until(env, lambda: env.exit_code == 0, timeout=240)
        stack.wait_until(trainer_process, lambda: _archived(runs / RUN) == STEPS * GROUPS, timeout=240)
    return runs / RUN


def _reported(rows: Path, step: int) -> bool:
    return rows.exists() and any(row["step"] == step for row in read_jsonl(rows))


def _archived(run: Path) -> int:
    return len(list(read_rollouts(run))) if (run / "rollouts").is_dir() else 0
