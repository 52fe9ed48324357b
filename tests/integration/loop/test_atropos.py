"""Stock environments of Atropos' train the model: they use the API's root, and generate from our vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tests.support.atropos_reference import PYTHON
from tests.support.ports import free_port
from tests.support.stack import ROOT, Output, Vllm, start_api, start_redis

from gristmill import Manifest, SyncClient
from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack, LocalStackError, answers

STEPS = 25
BATCH, GROUP = 128, 8
DATA = ROOT / "configs/datasets/quickstart/train.jsonl"
ENVIRONMENT = Path(__file__).with_name("sums_env.py")


def train(vllm: Vllm, folder: Path, steps: int, flags: str = "", *, proxy: bool = False) -> list[dict[str, Any]]:
    """Trains on groups of sums_env.py. Returns the rows of metrics.

    `flags`: of the environment. `proxy`: the environment uses the proxy of managed servers.
    """
    output = Output()
    tokenizer = Manifest.read(vllm.models_dir).tokenizer_path
    with LocalStack(output.add) as stack:
        redis_port, api_port, proxy_port = free_port(), free_port(), free_port()
        start_redis(stack, folder / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        directories = {
            "GRISTMILL_MODELS_DIR": str(vllm.models_dir),
            "GRISTMILL_WEIGHTS_DIR": str(vllm.weights_dir),
            "GRISTMILL_RUNS_DIR": str(folder / "runs"),
        }
        environ = {"PYTHONPATH": ""}
        if proxy:
            environ["ATROPOS_PROXY_URL"] = f"http://127.0.0.1:{proxy_port}"
            serves = f"proxy --listen 127.0.0.1:{proxy_port} --base_url {vllm.url}/v1"
            command = [sys.executable, "-m", "gristmill_env", *serves.split()]
            started = stack.start("proxy", command, directories)
            stack.wait_until(started, lambda: answers(f"{environ['ATROPOS_PROXY_URL']}/health"), timeout=120)
        serve = (
            f"serve --env.rollout_server_url {api_url} --env.total_steps 100000 --env.data {DATA} {flags} "
            f"--env.tokenizer_name {tokenizer} --openai.tokenizer_name {tokenizer} "
            f"--openai.base_url {vllm.url}/v1 --openai.model_name tiny --openai.server_type vllm"
        )
        trains = (
            f"--atropos_run default --training_steps {steps} --batch_size 64 --gradient_accumulation_steps 2 "
            f"--learning_rate 3e-4 --seq_len 128 --rollout_server_url {api_url} --base_url {vllm.url}"
        )
        # The environment first: it waits for a trainer.
        env = stack.start("env", [str(PYTHON), str(ENVIRONMENT), *serve.split()], environ)
        trainer = stack.start("trainer", [sys.executable, "-m", "gristmill_trainer", *trains.split()], directories)
        try:
            stack.wait_until(trainer, lambda: trainer.exit_code == 0, timeout=900)
            stack.wait_until(env, lambda: env.exit_code == 0, timeout=240)
        except LocalStackError as error:
            tail = "\n".join(
                "\n".join(output.of(name).splitlines()[-40:]) for name in ("api", "trainer", "env", "proxy")
            )
            raise AssertionError(f"{error}\n{tail}") from error
        with SyncClient(api_url) as api:
            audit = api.audit("default")
    rows = read_jsonl(folder / "runs/default/metrics.jsonl")
    assert len(rows) == steps
    assert len(audit.trained) == steps * BATCH // GROUP
    assert not audit.dead
    assert not audit.dropped
    return rows


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("logprobs", [True, False], ids=["logprobs", "no-logprobs"])
def test_training_learns_a_stock_environment_of_atropos(vllm: Vllm, tmp_path: Path, logprobs: bool) -> None:
    rows = train(vllm, tmp_path, STEPS, f"--env.send_logprobs {logprobs}")
    rewards = [row["reward_mean"] for row in rows]
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) >= 0.2, rewards
    # The first step's groups come from the initial weights, and both sides must agree on them.
    assert rows[0]["rollout_logprob_diff_max"] <= 0.01


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flags", ["", "--env.as_agent True"], ids=["environment", "program at its URL"])
def test_environment_behind_the_proxy_of_managed_servers_is_trained(vllm: Vllm, tmp_path: Path, flags: str) -> None:
    rows = train(vllm, tmp_path, 3, flags, proxy=True)
    assert rows[0]["rollout_logprob_diff_max"] <= 0.01
    if flags:
        # Two replies of about 5 tokens in each sequence.
        assert rows[0]["trained_tokens"] > 128 * 8
