"""scripts/run_lanes.sh: the stages of `make test` in two parallel chains. `make` runs small targets here."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from secure import ROOT

pytestmark = pytest.mark.slow

STAGES = """
one: ; @echo of one; echo "3 passed in 1.2s"; echo one >>order
two: ; @echo "=== 4 passed, 1 skipped in 62.50s (0:01:02) ==="; echo two >>order
bad: ; @cat started; echo why it failed; echo "=== 1 failed, 2 passed in 3s ==="; exit 1
first: ; @sleep 0.3; echo first >>order
broken: ; @echo no engine; exit 3
# Ends only by an interrupt, as a stage of pytest with servers does.
endless: ; @trap 'echo ended >>order; exit 1' INT; echo endless >started; while :; do sleep 0.05; done
"""


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    (tmp_path / "Makefile").write_text(STAGES)
    os.mkfifo(tmp_path / "started")
    return tmp_path


def lanes(folder: Path, *targets: str) -> subprocess.Popen[str]:
    command = [str(ROOT / "scripts" / "run_lanes.sh"), *targets]
    return subprocess.Popen(command, cwd=folder, env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE, text=True)


def test_targets_of_a_lane_run_in_order_and_the_summaries_come_last(stages: Path) -> None:
    run = lanes(stages, "@first one @first two", "first")
    output = run.communicate()[0]
    assert run.returncode == 0
    assert (stages / "order").read_text().split() == ["first", "one", "two"]
    assert "of one\n" in output
    assert output.splitlines()[-2:] == [
        "one: 3 passed in 1.2s", "two: === 4 passed, 1 skipped in 62.50s (0:01:02) ==="
    ]  # fmt: skip


def test_first_failure_interrupts_the_other_lane_and_its_output_is_the_last(stages: Path) -> None:
    run = lanes(stages, "bad one", "endless two")
    output = run.communicate()[0]
    assert run.returncode != 0
    assert (stages / "order").read_text().split() == ["ended"], "no target starts after the failure"
    assert "why it failed\n" in output
    assert output.splitlines()[-1] == "bad: === 1 failed, 2 passed in 3s ==="


def test_target_that_waits_for_a_failed_target_does_not_start(stages: Path) -> None:
    run = lanes(stages, "broken", "@broken one")
    assert "no engine\n" in run.communicate()[0]
    assert run.returncode != 0
    assert not (stages / "order").exists()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_targets(stages: Path, signal_number: signal.Signals) -> None:
    run = lanes(stages, "endless two")
    assert (stages / "started").read_text() == "endless\n"
    run.send_signal(signal_number)
    assert run.wait(60) != 0
    assert (stages / "order").read_text().split() == ["ended"]
