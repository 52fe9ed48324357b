"""Mistakes of users that show only with a real service: one clear line and a non-zero exit code.

tests/unit/env/test_cli.py has the other mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.ports import free_port
from tests.support.stack import ROOT, Output, Vllm, start_api, start_redis

from gristmill import SyncClient
from gristmill_cli.local.processes import LocalStack


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


@pytest.mark.long
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
        deadline = time.monotonic() + 120
        while f"127.0.0.1:{nothing}" not in output.of("api"):
            assert time.monotonic() < deadline, output.lines
            time.sleep(0.1)


@pytest.mark.long
def test_trainer_refuses_a_run_that_sets_a_trainer_hook(tmp_path: Path) -> None:
    """The API stores such a run, because a third party's trainer may have any settings."""
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\ndef f(event): pass\n")
    output = Output()
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, tmp_path / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        with SyncClient(api_url) as api:
            api.create_run("mine", {"trainer": {"on_step": f"{tmp_path}/mine.py:f"}}, 2)
        places = {"GRISTMILL_API_URL": api_url, "GRISTMILL_WEIGHTS_DIR": str(tmp_path / "weights")}
        trainer = stack.start("trainer", [sys.executable, "-m", "gristmill_trainer"], places)
        stack.wait_until(trainer, lambda: trainer.exit_code is not None, timeout=240)
        assert trainer.exit_code == 1
    assert "[trainer_only_key] " in output.of("trainer")
    assert "on_step" in output.of("trainer")
    assert not (tmp_path / "imported").exists()
