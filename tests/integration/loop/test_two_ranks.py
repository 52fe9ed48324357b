"""The whole trainer under torchrun: rank 0 calls the API and the model server, two processes train."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest
import torch
from tests.support.ports import free_port
from tests.support.stack import Output, Vllm, start_api, start_redis
from transformers import AutoModelForCausalLM

from gristmill import SyncClient
from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack

STEPS = 8
TRAINER = ["-m", "gristmill_trainer", "--training_steps", str(STEPS), "--checkpoint_interval", "5"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.long
def test_run_of_two_processes_is_resumed_by_one_process(vllm: Vllm, tmp_path: Path) -> None:
    output = Output()
    run = tmp_path / "runs" / "quickstart"
    rows_file = run / "metrics.jsonl"
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        places = vllm.environ(api_url, tmp_path / "runs")
        env = stack.start("env", [sys.executable, "-m", "gristmill_env", "--config", "quickstart"], places)
        two = stack.start("two", [sys.executable, *TORCHRUN, *TRAINER, "--token_budget", "1500"], places)
        stack.wait_until(two, lambda: rows_file.exists() and len(read_jsonl(rows_file)) >= 3, timeout=180)
        two.process.terminate()
        two.process.wait(60)
        assert "[stopped]" in output.of("two"), "rank 0 left by its own will"
        assert "ERROR" not in output.of("two")
        done = len(read_jsonl(rows_file))
        checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert 3 <= done < STEPS
        assert checkpoints[-1] == f"step-{done:06d}", "the stop wrote a checkpoint of the step it was in"

        one = stack.start("one", [sys.executable, *TRAINER], places)
        stack.wait_until(one, lambda: one.exit_code == 0, timeout=180)
        stack.wait_until(env, lambda: env.exit_code == 0, timeout=240)
        with SyncClient(api_url) as api:
            audit = api.audit("quickstart")
            told = api.metrics("quickstart", "trainer")

    rows = read_jsonl(rows_file)
    assert [row["step"] for row in rows] == [row.step for row in told] == list(range(1, STEPS + 1))
    versions = [row["policy_version"] for row in rows]
    assert versions == [f"1.{step}" if step <= done else f"2.{step}" for step in range(1, STEPS + 1)]
    # The published weights equal the weights that the two processes hold.
    assert max(row["rollout_logprob_diff_max"] for row in rows) <= 0.01
    assert all(0.0 <= row["reward_mean"] <= 1.0 and row["grad_norm"] > 0 for row in rows)
    assert len(audit.trained) == STEPS * 16, "each group once"
    assert httpx.get(f"{vllm.url}/weight_info").json()["weight_version"] == versions[-1]


@pytest.mark.long
def test_two_processes_finish_a_run(vllm: Vllm, tmp_path: Path) -> None:
    output = Output()
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        places = vllm.environ(f"http://127.0.0.1:{api_port}", tmp_path / "runs")
        refused = stack.start("lora", [sys.executable, *TORCHRUN, *TRAINER, "--lora_rank", "4"], places)
        env = stack.start("env", [sys.executable, "-m", "gristmill_env", "--config", "quickstart"], places)
        stack.wait_until(refused, lambda: refused.exit_code == 1, timeout=120)
        assert "[one_process_only]" in output.of("lora")
        assert "lora_rank is 4" in output.of("lora")
        flags = ["--training_steps", "2", "--publisher", "ipc"]
        two = stack.start("two", [sys.executable, *TORCHRUN, *TRAINER[:2], *flags], places)
        stack.wait_until(two, lambda: two.exit_code == 0, timeout=180)
        stack.wait_until(env, lambda: env.exit_code == 0, timeout=240)
    assert "ERROR" not in output.of("two")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "quickstart" / "model", dtype=torch.float32)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
