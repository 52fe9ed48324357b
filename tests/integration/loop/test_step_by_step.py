"""The terminals of docs/quickstart.md as printed, with a small model, a small data set and free ports."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.ports import free_port
from tests.support.stack import ROOT, Output, Vllm

from gristmill import SyncClient
from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack, answers


def _blocks() -> list[str]:
    """Returns the shell blocks of the section, without the indentation of its list."""
    section = (ROOT / "docs" / "quickstart.md").read_text().split("## Step by step")[1].split("\n## ")[0]
    return [re.sub("^   ", "", block, flags=re.MULTILINE) for block in re.findall(r"```sh\n(.*?)```", section, re.S)]


def _data_set(path: Path) -> Path:
    rng = random.Random(0)
    pairs = [(rng.randrange(50), rng.randrange(50)) for _ in range(120)]
    rows = [{"prompt": f"What is {a} + {b}?", "answer": f"#### {a + b}"} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def redis_port() -> Iterator[int]:
    port = free_port()
    yield port
    shutil.rmtree(ROOT / ".gristmill" / f"redis-{port}")


def test_printed_commands_finish_twenty_steps(vllm: Vllm, redis_port: int, tmp_path: Path) -> None:
    api_port = free_port()
    api_url = f"http://127.0.0.1:{api_port}"
    replaced = {
        "Qwen/Qwen2.5-1.5B": "tiny",
        "rows.jsonl": str(_data_set(tmp_path / "sums.jsonl")),
        "http://127.0.0.1:9001": vllm.url,
        "6379": str(redis_port),
        "8000": str(api_port),
    }
    commands = []
    for block in _blocks():
        for old, new in replaced.items():
            block = block.replace(old, new)
        commands.append(block)
    model, store, env_command, trainer_command = commands
    # This server runs already: the session's fixture started it by the same command.
    assert model.strip() == "MODEL=tiny .venv-model/bin/python -m gristmill_model"

    environ = vllm.environ(api_url, tmp_path / "runs") | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "WANDB_MODE": "offline",
    }
    output = Output()
    with LocalStack(output.add) as stack:
        api = stack.start("api", ["bash", "-ec", f"cd {ROOT}; {store}"], environ)
        stack.wait_until(api, lambda: answers(f"{api_url}/readyz"), timeout=240)
        env = stack.start("env", ["bash", "-ec", f"cd {ROOT}; {env_command}"], environ)
        trainer = stack.start("trainer", ["bash", "-ec", f"cd {ROOT}; {trainer_command}"], environ)
        stack.wait_until(env, lambda: env.exit_code == 0, timeout=240)
        stack.wait_until(trainer, lambda: trainer.exit_code == 0, timeout=240)

        with SyncClient(api_url) as client:
            audit = client.audit("local")
            reported = client.metrics("local", "trainer")
    rows = read_jsonl(tmp_path / "runs" / "local" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [{"step": row.step, **row.values} for row in reported] == rows
    assert max(row["rollout_logprob_diff_max"] for row in rows) <= 0.01
    assert len(audit.trained) == 20
    assert "SLURM_JOB_NODELIST" in output.of("env"), "it says which variable it lacks"
    assert list((tmp_path / "runs").rglob("*.wandb")), "W&B wrote nothing"
    assert "Traceback" not in output.of("env")
