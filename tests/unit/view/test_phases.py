"""Recorded lines of the services' logs have the expected meaning."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.view.recorded import LOGS

from gristmill_view.phases import Meaning, meaning, read_log


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("05:48:35 model   INFO    warm start step=400/800 loss=1.202", Meaning(phase="building the model 400/800")),
        (
            "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00, 325.95it/s]",
            Meaning(phase="loading the weights 1/2"),
        ),
        (
            "05:49:02 trainer INFO    took run quickstart: incarnation 1, step 20 of 60",
            Meaning(phase="publishes the weights of step 20", steps=60),
        ),
        (
            "05:49:09 env     INFO    120 of 200 prompts evaluated, 40/s, 210 tokens/s, about 2 s left",
            Meaning(phase="evaluates 120/200 prompts"),
        ),
        (
            "05:49:03 trainer INFO    step 1/60  reward 0.225  loss +0.0292  version 1.1  seconds: wait 0.41 pack 0.01",
            Meaning(step="step 1/60  reward 0.225  loss +0.0292  version 1.1", steps=60, phase="step 1"),
        ),
        ("05:49:05 env     WARNING a reward is slow", Meaning(warning="a reward is slow")),
        ("05:49:05 trainer ERROR   [needs_cuda] no GPU", Meaning(error="[needs_cuda] no GPU")),
        ("05:48:29 api     WARNING refused request='GET /v1/runs/x' code=run_missing why=y", Meaning()),
        ("(APIServer pid=19385) WARNING 11-23 05:48:43 [cpu.py:224] Triton is not installed.", Meaning()),
        ("05:49:03 env     INFO    score prompt=g00000000 n=0 format=1.000 accuracy=0.000 total=0.200", Meaning()),
        ("", Meaning()),
        ("x" * 2000 + " resolved model=tiny", Meaning()),
    ],
)
def test_log_line_is_recognized_with_its_meaning(line: str, expected: Meaning) -> None:
    assert meaning(line) == expected


def test_end_of_a_log_has_phase_steps_warnings_and_start(tmp_path: Path) -> None:
    for name, text in LOGS.items():
        (tmp_path / f"{name}.log").write_text(text)
    trainer, env = read_log(tmp_path / "trainer.log"), read_log(tmp_path / "env.log")
    assert (trainer.phase, trainer.steps, trainer.error) == ("step 1", 60, "")
    assert trainer.started is not None
    assert [*env.warnings] == ["env: 44 of the last 48 groups were dropped as same_scores: raise temperature"]


def test_error_of_an_earlier_start_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_text("--- started 2026-11-23 05:48:56, process 1\n05:49:05 trainer ERROR   [needs_cuda] no GPU\n")
    assert read_log(path).error == "[needs_cuda] no GPU"
    path.write_text(path.read_text() + "--- started 2026-11-23 05:50:56, process 2\n")
    assert read_log(path).error == ""
    path.write_text("x" * 200_000 + "\n05:49:05 trainer ERROR   late\n")
    assert read_log(path).error == "late"


@pytest.mark.parametrize(
    "line",
    [
        "--- started 2026-99-99 99:99:99, process 1",
        "--- started 0000-01-01 00:00:00, process 1",
        f"step 1/{'9' * 5000}  reward 0.5",
        f"took run quickstart: incarnation 1, step 1 of {'9' * 5000}",
    ],
)
def test_line_of_user_code_that_resembles_a_line_of_a_service_is_an_ordinary_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "env.log"
    path.write_text(f"{LOGS['trainer']}{line}\n")
    found = read_log(path)
    assert (found.steps, found.phase) == (60, "step 1")
    path.write_text(LOGS["trainer"])
    assert found == read_log(path)
