"""After a kill between two checkpoints, the trainer leases the same groups again and writes the same next
checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.groups import make_group
from tests.support.ports import free_port
from tests.support.stack import Output, Vllm, start_api, start_redis

from gristmill import SyncClient
from gristmill.internal.lines import read_jsonl
from gristmill_cli.local.processes import LocalStack, Service

STEPS = 4
GROUPS = 2
KILLED_AFTER = 3
"""Its groups are trained and not acked, because a checkpoint is written every second step."""


def _submit_step(api: SyncClient, run: str) -> None:
    sent = 0
    while sent < GROUPS:
        grant = api.permits(run, "test", GROUPS - sent, 60.0)
        for permit in grant.permits:
            assert grant.version is not None
            api.submit(make_group(permit.group_id, run, version=grant.version, seed=permit.row, env_id="test"), "test")
            sent += 1


def _train(vllm: Vllm, folder: Path, *, kill: bool) -> dict[str, Any]:
    """Returns the SHA-256 of the files of the last checkpoint."""
    folder.mkdir()
    with LocalStack(Output().add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, folder / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        api_url = f"http://127.0.0.1:{api_port}"
        places = vllm.environ(api_url, folder / "runs")
        flags = ["--training_steps", str(STEPS), "--batch_size", str(2 * GROUPS), "--publisher", "none"]
        flags += ["--checkpoint_interval", "2", "--learning_rate", "1e-4"]
        rows = folder / "runs" / "same" / "metrics.jsonl"

        def start() -> Service:
            return stack.start("trainer", [sys.executable, "-m", "gristmill_trainer", *flags], places)

        def killable(api: SyncClient) -> bool:
            acked = len(api.audit("same").trained) == (KILLED_AFTER - 1) * GROUPS
            return acked and rows.exists() and len(read_jsonl(rows)) == KILLED_AFTER

        with SyncClient(api_url) as api:
            api.create_run("same", {"trainer": {}, "dataset": {"max_tokens": 64}}, group_size=2)
            trainer = start()
            for step in range(1, STEPS + 1):
                _submit_step(api, "same")
                if kill and step == KILLED_AFTER:
                    # The trainer acks the second step when its checkpoint is written, which may be after the third.
                    stack.wait_until(trainer, lambda: killable(api), timeout=120)
                    trainer.process.kill()
                    trainer.process.wait()
                    assert len(api.audit("same").trained) == (KILLED_AFTER - 1) * GROUPS
                    trainer = start()
            stack.wait_until(trainer, lambda: trainer.exit_code == 0, timeout=120)
            assert len(api.audit("same").trained) == STEPS * GROUPS
    manifest = json.loads((rows.parent / "checkpoints" / f"step-{STEPS:06d}" / "manifest.json").read_text())
    files: dict[str, Any] = manifest["files"]
    return files


def test_killed_trainer_leases_the_same_groups_and_writes_the_same_bytes(vllm: Vllm, tmp_path: Path) -> None:
    straight = _train(vllm, tmp_path / "straight", kill=False)
    killed = _train(vllm, tmp_path / "killed", kill=True)
    # The state contains the version, and with it the trainer that wrote it; all else is the same.
    assert straight.keys() == killed.keys() >= {"model.safetensors", "optimizer.pt"}
    assert {name for name in straight if straight[name] != killed[name]} == {"trainer_state.json"}
