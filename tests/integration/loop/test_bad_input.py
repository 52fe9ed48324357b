"""Each mistake of a user gives one clear line and a non-zero exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from tests.support.ports import free_port
from tests.support.stack import ROOT, Output, Vllm, start_api, start_redis

from gristmill import SyncClient
from gristmill_api.store import keys
from local_processes import LocalStack

QUICKSTART = (ROOT / "configs" / "quickstart.yaml").read_text()


def _env(*arguments: str, timeout: float = 60, **environ: str) -> str:
    """Runs the environment, expects it to fail with one line, and returns that line."""
    done = subprocess.run(
        [sys.executable, "-m", "gristmill_env", *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    errors = [text for text in done.stdout.splitlines() if "ERROR" in text or text.startswith("error")]
    assert len(errors) == 1, done.stdout
    return errors[0]


def _config(tmp_path: Path, old: str = "", new: str = "") -> str:
    assert old in QUICKSTART
    path = tmp_path / "mine.yaml"
    data = ROOT / "configs" / "datasets" / "quickstart"
    path.write_text(QUICKSTART.replace(old, new).replace("datasets/quickstart", str(data)))
    return str(path)


def test_unknown_config_lists_the_available_configs() -> None:
    line = _env("--config", "gsm8")
    assert "[config_missing] " in line
    assert "'gsm8'" in line
    assert "gsm8k, gsm8k_debug" in line
    assert "quickstart" in line


def test_an_unknown_key_names_its_nearest_match(tmp_path: Path) -> None:
    line = _env("--config", _config(tmp_path, "prompt_field:", "promt_field:"))
    assert "[unknown_key] " in line
    assert [part for part in ("mine.yaml", "'dataset.promt_field'", "'prompt_field'") if part not in line] == []


def test_a_missing_local_data_set_is_named(tmp_path: Path) -> None:
    line = _env("--config", _config(tmp_path, "datasets/quickstart/train.jsonl", "nowhere/train.jsonl"))
    assert "[dataset_missing] " in line
    assert "nowhere/train.jsonl" in line


def test_a_missing_hub_data_set_is_named(tmp_path: Path) -> None:
    line = _env("--dataset_name", "nobody/nothing", "--reward_functions", "length", HF_HOME=str(tmp_path))
    assert "[dataset_unavailable] " in line
    assert "nobody/nothing" in line


def test_missing_field_lists_the_columns(tmp_path: Path) -> None:
    line = _env("--config", _config(tmp_path, "prompt_field: question", "prompt_field: questoin"))
    assert "[field_missing] " in line
    assert "questoin" in line
    assert "answer, question" in line or "question, answer" in line


def test_an_unregistered_reward_lists_the_names(tmp_path: Path) -> None:
    line = _env("--config", _config(tmp_path, "type: format", "type: formt"))
    assert "[unknown_reward] " in line
    assert "formt" in line
    assert "accuracy" in line
    assert "length" in line


def test_unreachable_model_server_is_named_with_the_time_it_was_tried() -> None:
    line = _env(
        "--config", "quickstart", "--base_url", "http://127.0.0.1:9", "--startup_patience", "2", "--tokenizer_name", "x"
    )
    assert "[model_server_unreachable] " in line
    assert "http://127.0.0.1:9" in line
    assert re.search(r" [2-9] s", line)


def test_config_that_names_another_model_is_refused_with_the_correction(vllm: Vllm) -> None:
    line = _env("--config", "quickstart", "--model_name", "Qwen/Qwen2.5-1.5B", "--base_url", vllm.url)
    assert "[model_not_served] " in line
    assert "MODEL=Qwen/Qwen2.5-1.5B" in line
    assert ".env" in line
    assert "'tiny'" in line


def test_environment_names_an_api_whose_redis_is_down(vllm: Vllm, tmp_path: Path) -> None:
    """Redis stops: the API answers 503 with the reason, and its clients report that reason too."""
    output = Output()
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        server = start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        server.stop(grace=5)
        line = _env(
            *("--config", "quickstart", "--base_url", vllm.url, "--startup_patience", "3"),
            *("--rollout_server_url", f"http://127.0.0.1:{api_port}"),
        )
    assert "[api_unreachable] " in line
    assert f"http://127.0.0.1:{api_port}" in line
    assert "Redis" in line


def test_api_started_without_redis_logs_the_redis_address(tmp_path: Path) -> None:
    output = Output()
    with LocalStack(output.add) as stack:
        port, nothing = free_port(), free_port()
        command = [sys.executable, "-m", "gristmill_api", "--host", "127.0.0.1", "--port", str(port)]
        stack.start("api", command, {"REDIS_URL": f"redis://127.0.0.1:{nothing}/0"})
        deadline = time.monotonic() + 30
        while f"127.0.0.1:{nothing}" not in output.of("api"):
            assert time.monotonic() < deadline, output.lines
            time.sleep(0.1)


def test_trainer_refuses_a_run_that_sets_a_trainer_hook(tmp_path: Path) -> None:
    """The API refuses such a run. The trainer checks again, because another client may have written the record."""
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\ndef f(event): pass\n")
    output = Output()
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        with SyncClient(api_url) as api, redis.Redis(port=redis_port) as store:
            api.create_run("mine", {"trainer": {}}, 2)
            store.hset(keys.record("mine"), "env", json.dumps({"trainer": {"on_step": f"{tmp_path}/mine.py:f"}}))
        places = {"GRISTMILL_API_URL": api_url, "GRISTMILL_WEIGHTS_DIR": str(tmp_path / "weights")}
        trainer = stack.start("trainer", [sys.executable, "-m", "gristmill_trainer"], places)
        stack.wait_until(trainer, lambda: trainer.exit_code is not None, timeout=60)
        assert trainer.exit_code == 1
    assert "[trainer_only_key] " in output.of("trainer")
    assert "on_step" in output.of("trainer")
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("flags", "code", "quoted"),
    [
        (["--training_stpes", "3"], "unknown_flag", "'training_steps'"),
        (["--batch_size", "many"], "invalid_settings", "'batch_size'"),
    ],
)
def test_trainer_checks_its_flags_at_the_start(flags: list[str], code: str, quoted: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gristmill_trainer", *flags],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"[{code}] " in done.stdout
    assert quoted in done.stdout
    assert "Traceback" not in done.stdout
