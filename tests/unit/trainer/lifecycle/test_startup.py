"""The start of a trainer whose run changes while the model is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from tests.support.errors import raises

from gristmill import ApiError, ConfigError, PolicyVersion, RunRecord, RunState, SyncClient
from gristmill.deployment import Deployment
from gristmill.leases import LeaseSession
from gristmill_trainer import startup
from gristmill_trainer.checkpoint.contents import STATE, Progress
from gristmill_trainer.checkpoint.store import CheckpointStore, find_resumption
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import CheckpointError
from gristmill_trainer.learner_factory import LearnerPlan
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.publish.servers import ServerList
from gristmill_trainer.settings import TrainerSettings
from gristmill_trainer.startup import _MainStart, _Plan, start
from gristmill_trainer.stop import StopRequest

RUN = RunRecord(run_id="r", state=RunState.OPEN, digest="0", group_size=2, env={}, created_at=0.0, creation="c1")


class Session:
    """A session whose `take` the API answers as a test prescribes."""

    def __init__(self, run: RunRecord, refusal: ApiError | None, take: Callable[[], object]) -> None:
        self.run = run
        self._refusal = refusal
        self._take = take

    def __enter__(self) -> Session:
        if self._refusal is not None:
            raise self._refusal
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        pass


def plan(folder: Path) -> _Plan:
    """The plan of a trainer that looks for a checkpoint now."""
    store = CheckpointStore(folder / RUN.run_id / "checkpoints", 2, RUN.creation)
    learner = LearnerPlan(ModelSource("m", "m", None, 512), None, TrainerSettings(), None)
    return _Plan(learner, find_resumption(store, "auto"), store, folder, None)


def take(planned: _Plan, refusal: ApiError | None = None, meanwhile: Callable[[], object] = lambda: None) -> bool:
    with ExitStack() as stack:
        starting = _MainStart([], {}, 1, stack)
        starting._run = RUN
        return starting._take_as_planned(cast("LeaseSession", Session(RUN, refusal, meanwhile)), planned)


def save(planned: _Plan, step: int, model_sha256: str | None = None) -> Path:
    """Writes the part of a checkpoint that the start reads without loading it."""
    folder = planned.checkpoints.folder / f"step-{step:06d}"
    folder.mkdir()
    progress = Progress(step=step, version=PolicyVersion(1, step), creation=RUN.creation, model_sha256=model_sha256)
    (folder / STATE).write_bytes(msgspec.json.encode(progress))
    return folder


@pytest.mark.parametrize(("status", "code"), [(409, "suspended"), (409, "other_creation"), (404, "run_missing")])
def test_trainer_looks_for_a_run_again_if_its_run_was_replaced_meanwhile(
    tmp_path: Path, status: int, code: str
) -> None:
    assert not take(plan(tmp_path), ApiError(code, status, "refused"))


def test_trainer_takes_its_run_and_ends_with_other_refusals(tmp_path: Path) -> None:
    assert take(plan(tmp_path))
    with raises(ApiError, "config_differs"):
        take(plan(tmp_path), ApiError("config_differs", 409, "refused"))


def test_trainer_plans_again_after_a_checkpoint_of_another_trainer(tmp_path: Path) -> None:
    """Its acks would be undone, and groups trained twice. The folder of a save in progress stays until the take."""
    planned = plan(tmp_path)
    partial = planned.checkpoints.folder / ".step-000004.1.4.partial"
    partial.mkdir()
    plan(tmp_path)
    assert partial.exists()
    assert not take(planned, meanwhile=lambda: save(planned, 2))
    assert not partial.exists()
    save(planned, 4)
    assert not take(planned), "before the take"
    replaced = save(planned, 6)
    replaced.rename(replaced.with_name(".step-000006.replaced"))
    current = dataclasses.replace(
        planned, resumption=find_resumption(planned.checkpoints, "auto", CheckpointStore.peek)
    )
    assert current.resumption.step == 4
    assert not take(current), "a kill between the two renames of a save"
    assert replaced.exists()
    assert take(
        dataclasses.replace(current, resumption=find_resumption(planned.checkpoints, "auto", CheckpointStore.peek))
    )


@pytest.mark.parametrize(("lora_rank", "trained_on", "refused"), [(4, "a", True), (4, "b", False), (0, "a", False)])
def test_adapters_are_for_the_model_that_they_were_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora_rank: int, trained_on: str, refused: bool
) -> None:
    planned = plan(tmp_path)
    folder = save(planned, 4, trained_on * 64)
    settings = TrainerSettings(lora_rank=lora_rank, publisher="none")
    source = dataclasses.replace(ModelSource.of("m"), sha256="b" * 64)
    monkeypatch.setattr(startup, "wait_for_run", lambda *_: RUN)
    monkeypatch.setattr(startup, "read_settings", lambda *_: settings)
    monkeypatch.setattr(startup, "find_model", lambda *_: source)
    monkeypatch.setattr(CheckpointStore, "load", lambda store, path: store.peek(path))
    with ExitStack() as stack:
        starting = _MainStart([], {}, 1, stack)
        starting._flags, starting._here, starting._api = {}, settings, cast("SyncClient", None)
        starting._deployment = Deployment.read({"GRISTMILL_RUNS_DIR": str(tmp_path)})
        starting._servers = cast("ServerList", SimpleNamespace(served=dict))
        starting._stop = StopRequest(1.0)
        if refused:
            with raises(CheckpointError, "checkpoint_mismatch", path=folder):
                starting.find_run()
        else:
            assert starting.find_run().resumption.step == 4


def test_trainer_checks_its_flags_before_it_looks_for_a_run() -> None:
    with raises(ConfigError, "unknown_flag"), start(["--training_stpes", "3"], {}, DistContext()):
        pass
