"""`evaluate` against a real vLLM: its measurements, its continuation after a kill, and its reports to the API."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.env.conftest import HandTrainer
from tests.support.stack import Vllm

from gristmill.folders import EVALUATION_GROUPS_FILE as GROUPS_FILE
from gristmill.internal.saved import SavedGroup
from gristmill_env.evaluation.folder import read_evaluation, read_plan

RUN = """
max_token_length: 96
startup_patience: 30
dataset:
  dataset_path: sums.jsonl
  prompt_field: question
  answer_field: answer
  max_tokens: 24
  temperature: 1.0
  reward_functions: [{type: format, weight: 0.2}, {type: accuracy, weight: 0.8}]
"""


class Evaluate:
    """Runs the command as a process, in a separate folder."""

    def __init__(self, folder: Path, vllm: Vllm) -> None:
        self.folder = folder
        kept = {key: value for key, value in os.environ.items() if not key.startswith("GRISTMILL_")}
        self.environ = kept | {
            "GRISTMILL_CONFIG_DIR": str(folder),
            "GRISTMILL_MODELS_DIR": str(vllm.models_dir),
            "GRISTMILL_MODEL_URL": vllm.url,
            "GRISTMILL_RUNS_DIR": str(folder / "runs"),
        }

    def start(self, *flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gristmill_env", "evaluate", "--config", "sums", *flags]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def __call__(self, *flags: str, code: int = 0) -> str:
        """Returns the process's output, errors included. Fails unless the exit code is `code`."""
        process = self.start(*flags)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, f"{out}\n{err}"
        return out + err

    def results(self, folder: str) -> Any:
        return json.loads((self.folder / folder / "results.json").read_text())

    def groups(self, folder: str) -> list[SavedGroup]:
        return read_evaluation(self.folder / folder)


@pytest.fixture
def evaluate(tmp_path: Path, vllm: Vllm) -> Evaluate:
    rows = [{"question": f"What is {n} + {n % 7}?", "answer": f"#### {n + n % 7}"} for n in range(60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(RUN)
    return Evaluate(tmp_path, vllm)


@pytest.mark.long
def test_repeated_greedy_evaluation_writes_identical_samples(evaluate: Evaluate) -> None:
    said = evaluate("--out", "a", "--eval_limit", "40")
    evaluate("--out", "b", "--eval_limit", "40", "--max_eval_workers", "3", "--seed", "7")
    assert (evaluate.folder / "a" / GROUPS_FILE).read_bytes() == (evaluate.folder / "b" / GROUPS_FILE).read_bytes()
    records, plan = evaluate.groups("a"), read_plan(evaluate.folder / "a")
    assert [group.row for group in records] == [group.index for group in records] == list(range(40))
    assert {len(group.completions) for group in records} == {1}
    assert (plan.model, plan.sampling.temperature, plan.samples, plan.decides) == ("tiny", 0, 1, "accuracy")
    found = evaluate.results("a")
    right = sum(bool(group.completions[0].right) for group in records)
    assert found["figures"]["pass@1"] == pytest.approx(right / 40)
    assert found["figures"]["reward/accuracy"] == pytest.approx(right / 40)
    for part in ("40 of 60 prompts, 1 sample each, greedy", "pass@1", "40 of 40 prompts evaluated", "tokens/s"):
        assert part in said
    assert "0, 0, 40" in evaluate("--compare", "a", "b")  # better, worse, same


@pytest.mark.long
def test_sampled_evaluation_reports_majority_and_pass_at_k(evaluate: Evaluate) -> None:
    said = evaluate("--out", "a", "--eval_limit", "20", "--eval_samples", "4", "--compare", "greedy", code=1)
    assert "[evaluation_missing] " in said
    assert "greedy/evaluation.json" in said
    assert not (evaluate.folder / "a").exists()  # reported before the work, not after
    evaluate("--out", "greedy", "--eval_limit", "20")
    said = evaluate("--out", "a", "--eval_limit", "20", "--eval_samples", "4", "--compare", "greedy")
    records = evaluate.groups("a")
    assert {len(group.completions) for group in records} == {4}
    assert any(len({one.text for one in group.completions}) > 1 for group in records)
    results = evaluate.results("a")["figures"]
    assert results["pass@1"] <= results["pass@2"] <= results["pass@4"]
    for part in ("temperature 1, top_p 1", "maj@4", "20 prompts", "samples is 1"):
        assert part in said
    assert (evaluate.folder / "a" / "comparison.json").exists()


@pytest.mark.long
def test_killed_evaluation_resumes_where_it_stopped(evaluate: Evaluate) -> None:
    flags = ("--eval_samples", "2", "--max_eval_workers", "1")
    process = evaluate.start(*flags)
    done = _wait_for_lines(evaluate.folder / "runs" / "sums" / "evaluations", 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (path,) = (evaluate.folder / "runs").rglob(GROUPS_FILE)
    before = path.read_bytes()
    kept = before[: before.rfind(b"\n") + 1].splitlines(keepends=True)
    assert 5 <= done <= len(kept) < 60

    said = evaluate(*flags, "--resume", "--eval_temperature", "0.5", code=1)
    assert "[config_differs] " in said
    assert "temperature: 1.0 -> 0.5" in said
    assert f"{len(kept)} prompts resumed" in evaluate(*flags, "--resume")
    after = path.read_bytes().splitlines(keepends=True)
    assert after[: len(kept)] == kept  # one worker: in order
    assert [group.row for group in read_evaluation(path.parent)] == list(range(60))
    assert "[nothing_to_resume] " in evaluate(*flags, "--resume", code=1)
    assert "60 prompts resumed" in evaluate(*flags, "--resume", "--out", str(path.parent))


@pytest.mark.long
def test_stopped_evaluation_keeps_its_samples_and_resumes(evaluate: Evaluate) -> None:
    process = evaluate.start("--out", "a", "--max_eval_workers", "1", "--eval_samples", "2")
    _wait_for_lines(evaluate.folder, 3)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert len(evaluate.groups("a")) >= 3
    evaluate("--out", "a", "--max_eval_workers", "1", "--eval_samples", "2", "--resume")
    assert len(evaluate.groups("a")) == 60


@pytest.mark.long
def test_prompts_that_leave_no_room_are_counted_and_not_wrong(evaluate: Evaluate) -> None:
    said = evaluate("--out", "a", "--max_token_length", "4", "--eval_limit", "3")
    assert "not asked: 3 too_long" in said
    found = evaluate.results("a")
    assert (found["rows"], found["prompts"]) == (60, 0)


@pytest.mark.long
def test_evaluation_of_the_runs_weights_is_reported_to_the_api(evaluate: Evaluate, trainer: HandTrainer) -> None:
    trainer.label("default")
    evaluate("--out", "a", "--eval_limit", "4", "--rollout_server_url", trainer.url)
    trainer.api.create_run("sums", {}, 2)
    trainer.take()
    trainer.publish(3)
    evaluate("--out", "b", "--eval_limit", "4", "--rollout_server_url", trainer.url)
    (row,) = trainer.api.metrics("sums", "evaluate")
    assert (row.step, row.values["prompts"], row.values["versions"]) == (3, 4, "1.3")
    assert read_plan(evaluate.folder / "b").weights == "1.3"
    trainer.label("9.9")
    said = evaluate("--out", "c", "--eval_limit", "4", "--rollout_server_url", trainer.url)
    assert re.search(r"WARNING.*\bsums\b.*\b9\.9\b", said)


def _wait_for_lines(folder: Path, lines: int) -> int:
    deadline = time.monotonic() + 60
    while True:
        found = sum(path.read_bytes().count(b"\n") for path in folder.rglob(GROUPS_FILE))
        if found >= lines:
            return found
        assert time.monotonic() < deadline, "no samples came"
        time.sleep(0.01)
