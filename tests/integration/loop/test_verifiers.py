"""A taskset of verifiers trains `tiny` for ten steps: the environment service runs in `.venv-verifiers`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml
from tests.support.ports import free_port
from tests.support.stack import ROOT, Output, Vllm, start_api, start_redis

from gristmill import read_rollouts
from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack

PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
TASKSETS = ROOT / "tests" / "unit" / "env" / "gateway"
SOURCES = ("sdk/src", "view/src", "services/env/src")
STEPS = 10


@pytest.mark.long
def test_taskset_trains_for_ten_steps(vllm: Vllm, tmp_path: Path) -> None:
    assert PYTHON.exists(), f"no {PYTHON}: run `scripts/make_venv.sh verifiers`"
    taskset = {"id": "verifiers_sums", "most": 12}
    settings = {
        "environment": {"type": "verifiers", "params": {"taskset": taskset}},
        "group_size": 4,
        "max_token_length": 128,
        "ensure_scores_are_not_same": False,
        "include_messages": True,
        "dataset": {"max_tokens": 24, "reward_functions": ["episode"]},
        "trainer": {"training_steps": STEPS, "batch_size": 8, "learning_rate": 1.0e-4, "max_staleness": 0},
    }
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(settings))
    paths = [str(ROOT / folder) for folder in SOURCES] + [str(TASKSETS)]
    output = Output()
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port, GRISTMILL_RUNS_DIR=str(tmp_path / "runs"))
        environ = vllm.environ(f"http://127.0.0.1:{api_port}", tmp_path / "runs", tmp_path)
        trainer = stack.start("trainer", [sys.executable, "-m", "gristmill_trainer"], environ)
        serve = [str(PYTHON), "-m", "gristmill_env", "serve", "--config", "sums"]
        env = stack.start("env", serve, {**environ, "PYTHONPATH": os.pathsep.join(paths)})
        stack.wait_until(trainer, lambda: trainer.exit_code == 0, timeout=600)
        stack.wait_until(env, lambda: env.exit_code == 0, timeout=120)
    rows = read_jsonl(tmp_path / "runs" / "sums" / "metrics.jsonl")
    assert len(rows) == STEPS
    assert max(row["rollout_logprob_diff_max"] for row in rows) < 1e-2, "the trained tokens are the sampled ones"
    groups = list(read_rollouts(tmp_path / "runs" / "sums"))
    assert len(groups) >= STEPS * 2
    asked = {str(messages[1]["content"]) for group in groups for messages in group.messages or ()}
    assert "What is 4 + 4?" in asked
    assert "What is 5 + 5?" not in asked, "failed episodes are left out"
    assert "reason=environment_error" in output.of("env")
