"""configs/mixture.yaml with a real vLLM: sums, an agent and programs in one run, across kills."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.support.launcher import launch
from tests.support.stack import Vllm

from gristmill import read_rollouts
from gristmill.internal.lines import read_jsonl
from gristmill.internal.receipts import RECEIPTS_FILE, ReceiptState, read_receipts

STEPS, GROUPS = 8, 16
SOURCES = {"calculator", "programs", "sums"}


def children(pid: int, module: str) -> list[int]:
    """Returns the child processes of `pid` that run `python -m MODULE`."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")]


class Run:
    """A launcher, and the files of its run."""

    def __init__(self, folder: Path, vllm: Vllm) -> None:
        self.process, self.port = launch(folder, vllm, "--config", "mixture", "--training_steps", str(STEPS))
        self.folder = folder / "runs" / "mixture"

    @property
    def steps(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return len(read_jsonl(metrics)) if metrics.exists() else 0

    def wait_until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + 400
        while not done():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def sandbox(self) -> list[int]:
        [env] = children(self.process.pid, "gristmill_env")
        return children(env, "gristmill_sandbox")

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=400)
        return self.process.returncode, output


def submitted(folder: Path, source: str) -> int:
    return (folder / "logs" / "env.log").read_text().count(f" source={source} ")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_run_of_three_sources_loses_nothing_when_sandbox_and_environment_are_killed(vllm: Vllm, tmp_path: Path) -> None:
    run = Run(tmp_path, vllm)
    try:
        run.wait_until(lambda: run.steps >= 2)
        [killed] = run.sandbox()
        os.kill(killed, signal.SIGKILL)
        before = submitted(run.folder, "programs")
        run.wait_until(lambda: submitted(run.folder, "programs") > before + 4)
        [sandbox] = run.sandbox()
        assert sandbox != killed, "the environment has started another sandbox"
        url = f"http://127.0.0.1:{run.port}/view/api/runs/mixture/series"
        page = httpx.get(url, params={"name": "source_rewards.*"}, timeout=60)
        assert set(page.json()["series"]) == {f"source_rewards.{source}" for source in SOURCES}
        [env] = children(run.process.pid, "gristmill_env")
        os.kill(env, signal.SIGKILL)
        code, output = run.end()
        assert code == 1
        assert "error [service_killed]: env " in output
        assert run.steps < STEPS, "the kill was in the middle"
        while Path(f"/proc/{sandbox}").exists():  # It ends with its environment; pytest's time limit bounds the wait.
            time.sleep(0.1)
        run = Run(tmp_path, vllm)
        code, output = run.end()
        assert code == 0, output
    finally:
        run.process.kill()
        run.process.wait()
    metrics = read_jsonl(run.folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert all(row["source_rewards"].keys() == SOURCES for row in metrics)
    assert max(row["rollout_logprob_diff_max"] for row in metrics) <= 0.01
    groups = list(read_rollouts(run.folder))
    assert len({group.row for group in groups}) == len(groups) == STEPS * GROUPS, "no row is lost or trained twice"
    counts = Counter(str(group.meta["source"]) for group in groups)
    weights = {"sums": 2, "calculator": 1, "programs": 1}
    assert all(abs(counts[name] - len(groups) * weight / 4) <= 2 for name, weight in weights.items()), counts
    for group in groups:
        scored = {"sums": {"format", "accuracy"}, "calculator": {"episode"}, "programs": {"code"}}
        assert set(group.reward_parts) == scored[str(group.meta["source"])]
        assert all(value is not None for values in group.reward_parts.values() for value in values)
    assert {receipt.state for receipt in read_receipts(run.folder / RECEIPTS_FILE)} == {ReceiptState.OK}
