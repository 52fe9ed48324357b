"""A stock environment of Atropos' trains the model: it uses the API's root, and generates from our vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import pytest
from tests.support.atropos_reference import PYTHON
from tests.support.ports import free_port
from tests.support.stack import ROOT, Output, Vllm, start_api, start_redis

from gristmill import Manifest, SyncClient
from gristmill.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack, LocalStackError

STEPS = 25
DATA = ROOT / "configs/datasets/quickstart/train.jsonl"
ENVIRONMENT = Path(__file__).with_name("sums_env.py")


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("logprobs", [True, False], ids=["logprobs", "no-logprobs"])
def test_training_learns_a_stock_environment_of_atropos(vllm: Vllm, tmp_path: Path, logprobs: bool) -> None:
    output = Output()
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        directories = {
            "GRISTMILL_MODELS_DIR": str(vllm.models_dir),
            "GRISTMILL_WEIGHTS_DIR": str(vllm.weights_dir),
            "GRISTMILL_RUNS_DIR": str(tmp_path / "runs"),
        }
        serve = (
            f"serve --env.rollout_server_url {api_url} --env.total_steps 100000 --env.data {DATA} "
            f"--env.send_logprobs {logprobs} --env.tokenizer_name {Manifest.read(vllm.models_dir).tokenizer_path} "
            f"--openai.base_url {vllm.url}/v1 --openai.model_name tiny --openai.server_type vllm "
            f"--openai.tokenizer_name {Manifest.read(vllm.models_dir).tokenizer_path}"
        )
        train = (
            f"--atropos_run default --training_steps {STEPS} --batch_size 64 --gradient_accumulation_steps 2 "
            f"--learning_rate 3e-4 --seq_len 128 --rollout_server_url {api_url} --base_url {vllm.url}"
        )
        # The environment first: it waits for a trainer.
        env = stack.start("env", [str(PYTHON), str(ENVIRONMENT), *serve.split()], {"PYTHONPATH": ""})
        trainer = stack.start("trainer", [sys.executable, "-m", "gristmill_trainer", *train.split()], directories)
        try:
            stack.wait_until(trainer, lambda: trainer.exit_code == 0, timeout=900)
            stack.wait_until(env, lambda: env.exit_code == 0, timeout=240)
        except LocalStackError as error:
            tail = "\n".join("\n".join(output.of(name).splitlines()[-40:]) for name in ("api", "trainer", "env"))
            raise AssertionError(f"{error}\n{tail}") from error
        with SyncClient(api_url) as api:
            audit = api.audit("default")
    rows = read_jsonl(tmp_path / "runs/default/metrics.jsonl")
    rewards = [row["reward_mean"] for row in rows]
    assert len(rows) == STEPS
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) >= 0.2, rewards
    # The first step's groups come from the initial weights, and both sides must agree on them.
    assert rows[0]["rollout_logprob_diff_max"] <= 0.01
    assert len(audit.trained) == STEPS * 128 // 8
    assert not audit.dead
    assert not audit.dropped
