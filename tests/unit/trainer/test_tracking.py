"""The trainer's observers: W&B and TensorBoard, read back from their files, and errors that end no training."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import wandb
from prometheus_client import CollectorRegistry
from tests.support.wandb_file import read_wandb
from tests.unit.trainer.test_metrics import metrics, result, statistics

from gristmill import ConfigError
from gristmill_trainer.observers import Observers, TensorBoardTracker, WandbTracker, open_observers
from gristmill_trainer.settings import TrainerSettings


def wandb_tracker(folder: Path, **settings: Any) -> Callable[[], WandbTracker]:
    made = TrainerSettings(device="cpu", **settings)
    return partial(WandbTracker, "sums", made, folder, {"NETRC": str(folder / "none")})


@pytest.mark.long
def test_tracker_logs_a_steps_metrics_by_policy_step(tmp_path: Path) -> None:
    tracker = wandb_tracker(tmp_path, wandb_name="sums-1", learning_rate=1e-4)()
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


def test_wandb_errors_are_counted_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: object, **named: object) -> None:
        raise wandb.Error("the run is gone")

    observers = Observers()
    observers.open("W&B", wandb_tracker(tmp_path))
    monkeypatch.setattr(wandb.Run, "log", fails)
    monkeypatch.setattr(wandb.Run, "finish", fails)
    for _ in range(2):
        observers.step(metrics(statistics(), result()))
    observers.close()
    assert observers.errors.counts == {"W&B": 3}
    assert "the run is gone" in caplog.text


def test_training_continues_if_wandb_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**named: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(wandb, "init", fails)
    observers = Observers()
    observers.open("W&B", wandb_tracker(tmp_path))
    observers.step(metrics(statistics(), result()))
    observers.close()
    assert observers.errors.counts == {"W&B": 1}


def test_observer_that_fails_does_not_affect_the_others() -> None:
    class Fails:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name} today")

    class Counts:
        steps = closed = 0

        def step(self, found: object) -> None:
            self.steps += 1

        def close(self) -> None:
            self.closed += 1

    counts, observers = Counts(), Observers()
    observers.open("first", Fails)
    observers.open("second", lambda: counts)
    observers.step(metrics(statistics(), result()))
    observers.close()
    assert (counts.steps, counts.closed) == (1, 1)
    assert observers.errors.counts == {"first": 2}


def test_wrong_setting_of_an_observer_is_an_error_at_the_start() -> None:
    def misconfigured() -> WandbTracker:
        raise ConfigError("secret_file_unreadable", "the key file does not exist")

    with pytest.raises(ConfigError):
        Observers().open("W&B", misconfigured)


def events(folder: Path) -> list[Any]:
    """Returns the events of all event files, oldest file first. Checks the length of each record."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 12 + length + 4
        assert at == len(data), "a torn record"
    return found


def test_tensorboard_has_the_numbers_of_every_step_at_once(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path / "tensorboard", first_step=3)
    told = metrics(statistics(), result())
    tracker.step(told)
    header, start, step = events(tmp_path / "tensorboard")  # before the file is closed, as after a kill
    tracker.close()
    assert header.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (4, 1), "later steps of earlier files are left out from here"
    assert step.step == 4
    values = {value.tag: value.simple_value for value in step.summary.value}
    assert values["train/reward_mean"] == pytest.approx(told.reward_mean)
    assert values["train/seconds/wait"] == 1.0
    assert values["train/staleness/2"] == 1
    assert "train/policy_version" not in values, "text is not a metric"


def test_full_disk_ends_no_training_and_delays_no_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    observers = Observers()
    observers.open("TensorBoard", partial(TensorBoardTracker, tmp_path, 0))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.flush", full)
    for _ in range(50):  # more than the queue of the library's own writer holds
        observers.step(metrics(statistics(), result()))
    assert observers.errors.counts == {"TensorBoard": 50}


def test_settings_choose_the_observers(tmp_path: Path) -> None:
    none = open_observers("sums", TrainerSettings(device="cpu"), tmp_path, 0, {}, None)
    none.step(metrics(statistics(), result()))
    none.close()
    assert list(tmp_path.iterdir()) == []
    registry = CollectorRegistry()
    both = open_observers("sums", TrainerSettings(device="cpu", tensorboard=True), tmp_path, 0, {}, registry)
    both.step(metrics(statistics(), result()))
    both.close()
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]
    assert registry.get_sample_value("gristmill_trainer_step", {"run": "sums"}) == 4
    assert both.errors.counts == {}
