"""The trainer's W&B entries, read back from an offline run."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb
from tests.support.wandb_file import read_wandb
from tests.unit.trainer.test_metrics import metrics, result, statistics

from gristmill_trainer.display import WandbTracker
from gristmill_trainer.settings import TrainerSettings


def test_tracker_logs_a_steps_metrics_by_policy_step(tmp_path: Path) -> None:
    settings = TrainerSettings(device="cpu", wandb_name="sums-1", learning_rate=1e-4)
    tracker = WandbTracker("sums", settings, tmp_path, {"NETRC": str(tmp_path / "none")})
    told = metrics(statistics(), result())
    tracker.step(told)
    tracker.close()
    run = read_wandb(tmp_path)
    assert run.group == "sums"
    assert run.name.startswith("sums-1")
    assert run.config["learning_rate"] == 1e-4
    (entry,) = run.history
    assert entry["policy_step"] == 4
    assert (entry["train/loss"], entry["train/grad_norm"]) == (0.25, 1.5)
    assert entry["train/seconds/wait"] == 1.0
    assert entry["train/reward_mean"] == told.reward_mean
    assert "train/skipped" not in entry, "text is not a metric"


def test_tracker_counts_wandb_errors_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: object, **named: object) -> None:
        raise wandb.Error("the run is gone")

    tracker = WandbTracker("sums", TrainerSettings(device="cpu"), tmp_path, {"NETRC": str(tmp_path / "none")})
    monkeypatch.setattr(wandb.Run, "log", fails)
    monkeypatch.setattr(wandb.Run, "finish", fails)
    for _ in range(2):
        tracker.step(metrics(statistics(), result()))
    tracker.close()
    assert tracker.errors.counts == {"W&B": 3}
    assert "the run is gone" in caplog.text


def test_training_continues_if_wandb_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**named: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(wandb, "init", fails)
    tracker = WandbTracker("sums", TrainerSettings(device="cpu"), tmp_path, {"NETRC": str(tmp_path / "none")})
    tracker.step(metrics(statistics(), result()))
    tracker.close()
    assert tracker.errors.counts == {"W&B": 1}
