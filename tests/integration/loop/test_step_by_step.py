"""The three terminals of the README, with a small model and data set in place of the large ones."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tests.support.ports import free_port
from tests.support.stack import Output, Vllm, start_api, start_redis

from gristmill import Manifest, SyncClient
from gristmill.metrics import read_jsonl
from local_processes import LocalStack


def _data_set(path: Path) -> Path:
    rng = random.Random(0)
    pairs = [(rng.randrange(50), rng.randrange(50)) for _ in range(120)]
    rows = [{"prompt": f"What is {a} + {b}?", "answer": f"#### {a + b}"} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_three_terminals_finish_twenty_steps(vllm: Vllm, tmp_path: Path) -> None:
    output = Output()
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        manifest = Manifest.read(vllm.models_dir)
        directories = {
            "GRISTMILL_MODELS_DIR": str(vllm.models_dir),
            "GRISTMILL_WEIGHTS_DIR": str(vllm.weights_dir),
            "GRISTMILL_RUNS_DIR": str(tmp_path / "runs"),
            "WANDB_MODE": "offline",
        }
        serve = (
            f"serve --group_size 4 --max_num_workers 2 --rollout_server_url {api_url} --tokenizer_name "
            f"{manifest.tokenizer_path} --use_wandb --wandb_name step-by-step --max_token_length 512 "
            f"--ensure_scores_are_not_same --dataset_name {_data_set(tmp_path / 'sums.jsonl')} --split train[:100] "
            "--prompt_field prompt --answer_field answer --reward_functions length --max_tokens 128 --temperature 0.7 "
            f"--model_name tiny --base_url {vllm.url}/v1 --slurm --testing"
        )
        train = (
            f"--model_name tiny --training_steps 20 --batch_size 2 --gradient_accumulation_steps 2 --seq_len 512 "
            f"--rollout_server_url {api_url} --base_url {vllm.url}"
        )
        env = stack.start("env", [sys.executable, "-m", "gristmill_env", *serve.split()], directories)
        trainer = stack.start("trainer", [sys.executable, "-m", "gristmill_trainer", *train.split()], directories)
        stack.wait_until(env, lambda: env.exit_code == 0, timeout=240)
        stack.wait_until(trainer, lambda: trainer.exit_code == 0, timeout=60)

        with SyncClient(api_url) as api:
            audit = api.audit("local")
            told = api.metrics("local", "trainer")
        rows = read_jsonl(tmp_path / "runs" / "local" / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, 21))
        assert [{"step": row.step, **row.values} for row in told] == rows
        assert max(row["rollout_logprob_diff_max"] for row in rows) <= 0.01
        assert len(audit.trained) == 20
        assert "no Slurm job is here" in output.of("env")
        assert list((tmp_path / "runs").rglob("*.wandb")), "W&B wrote nothing"
