"""Receipts of a real vLLM: each publication of a quickstart is proven, and a publication that went wrong is noticed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.support.ports import free_port
from tests.support.stack import ROOT, Output, Vllm, start_api, start_redis

from gristmill import Manifest, SyncClient
from gristmill.internal.lines import read_jsonl
from gristmill.internal.receipts import RECEIPTS_FILE, Proven, ReceiptState, proven, read_receipts
from gristmill_cli.local.processes import LocalStack, Service

STEPS = 4


def _run(stack: LocalStack, vllm: Vllm, folder: Path, command: list[str]) -> tuple[Service, str]:
    """Runs a quickstart until its trainer ends. Returns the trainer and the run's newest announced version."""
    redis_port, api_port = free_port(), free_port()
    start_redis(stack, folder / "redis", redis_port)
    start_api(stack, redis_port, api_port)
    api_url = f"http://127.0.0.1:{api_port}"
    places = vllm.environ(api_url, folder / "runs", ROOT / "configs")
    stack.start("env", [sys.executable, "-m", "gristmill_env", "--config", "quickstart"], places)
    flags = ["--training_steps", str(STEPS), "--checkpoint_interval", "2"]
    trainer = stack.start("trainer", [sys.executable, *command, *flags], places)
    stack.wait_until(trainer, lambda: trainer.exit_code is not None, timeout=300)
    with SyncClient(api_url) as api:
        return trainer, api.get_run("quickstart").version or ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("publisher", "sleep"), [("filesystem", False), ("ipc", False), ("filesystem", True), ("nccl", True)]
)
def test_every_publication_of_a_run_is_proven(vllm: Vllm, tmp_path: Path, publisher: str, sleep: bool) -> None:
    """`sleep`: the server sleeps during each step."""
    output, sleeps = Output(), _sleeps(vllm)
    if sleep:
        Manifest.read(vllm.models_dir).model_copy(update={"sleep": True}).write(tmp_path / "models")
        vllm = replace(vllm, models_dir=tmp_path / "models")
    with LocalStack(output.add) as stack:
        trainer, _ = _run(stack, vllm, tmp_path, ["-m", "gristmill_trainer", "--publisher", publisher])
    assert trainer.exit_code == 0, output.lines[-40:]
    assert _sleeps(vllm) - sleeps == (STEPS if sleep else 0)
    run = tmp_path / "runs" / "quickstart"
    receipts = read_receipts(run / RECEIPTS_FILE)
    assert [(one.version, one.state, one.attempt) for one in receipts] == [
        (f"1.{step}", ReceiptState.OK, 1) for step in range(STEPS + 1)
    ]
    assert {one.server for one in receipts} == {vllm.url}
    for one in receipts:
        assert one.difference is not None
        assert one.difference <= 1e-5
        # On a CPU, vLLM packs the weights of linear layers, and keeps table, head, norms and biases as they are.
        assert one.compared >= 4
    for one in receipts[1:]:
        assert one.change is not None
        assert one.change > 1e-3
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["receipts"] for row in rows] == [{"ok": 1}] * STEPS
    assert rows[1]["receipt_difference"] == receipts[1].difference
    assert f"| Receipts | {STEPS + 1} of {STEPS + 1} publications proven |" in (run / "model" / "README.md").read_text()


def _sleeps(vllm: Vllm) -> int:
    """Returns how often the server has fallen asleep."""
    return sum('"POST /gristmill/sleep' in text for text in vllm.output.lines)


_PUBLISHES_ELSEWHERE = """
import sys
from gristmill_trainer.__main__ import main
from gristmill_trainer.publish.servers import ModelServer
publish = ModelServer.publish
def elsewhere(self, path, version):
    publish(self, path.with_name("1.1") if version.step == 2 else path, version)
ModelServer.publish = elsewhere
sys.exit(main())
"""


@pytest.mark.long
def test_training_ends_when_the_server_has_the_label_without_the_weights(vllm: Vllm, tmp_path: Path) -> None:
    output = Output()
    with LocalStack(output.add) as stack:
        trainer, version = _run(stack, vllm, tmp_path, ["-c", _PUBLISHES_ELSEWHERE])
    assert trainer.exit_code not in (None, 0)
    assert "[receipt_failed]" in output.of("trainer")
    receipts = read_receipts(tmp_path / "runs" / "quickstart" / RECEIPTS_FILE)
    assert [(one.version, one.state, one.cause) for one in receipts] == [
        ("1.0", "ok", None),
        ("1.1", "ok", None),
        ("1.2", "failed", "label_without_weights"),
        ("1.2", "failed", "label_without_weights"),
    ]
    assert proven(receipts) == Proven(2, 3)
    assert version == "1.2", "environments sample while the server answers the probes"
    assert httpx.get(f"{vllm.url}/weight_info").json()["weight_version"] == "unproven"
