"""A run of the real loop is trained again from its folder, without services.

tests/integration/loop/test_retrain.py uses a run of real services.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import yaml
from tests.support.errors import raises
from tests.unit.trainer.lifecycle.api_stand_in import ApiStandIn
from tests.unit.trainer.lifecycle.conftest import step_groups
from tests.unit.trainer.lifecycle.test_loop import SKIPS, Trainer

from gristmill import ApiError, RunRecord, RunState, SyncClient, TrajectoryGroup
from gristmill.archive import GroupIndex
from gristmill.folders import RunFolder
from gristmill.hyperparameters import TRAINER_ONLY
from gristmill.internal.archive_writer import RunWriter
from gristmill.internal.flags import parse_flags
from gristmill.internal.lines import read_jsonl
from gristmill.internal.metrics import METRICS_FILE
from gristmill_trainer.checkpoint.digests import TrainerFacts
from gristmill_trainer.errors import ModelError
from gristmill_trainer.learner_factory import LearnerPlan
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.replay.bisect import bisect
from gristmill_trainer.replay.commands import Here, main
from gristmill_trainer.replay.fork import can_start, copy_checkpoint, prepare
from gristmill_trainer.replay.recorded import RecordedRun, ReplayError
from gristmill_trainer.replay.retrain import Request, retrain, verify
from gristmill_trainer.replay.untrusted import UntrustedError
from gristmill_trainer.settings import TrainerSettings

STEPS = 4
SOURCE = ModelSource("model", "model", None, 512)
OUTLIER = "g00000006"
"""A group of step 3, whose second completion has log-probabilities of another model."""


SERVICE = r"""
import os, signal
signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
os.write(1, b"ready\n")  # In one piece: both services have this pipe.
os.write(1, f"stopped by {int(signal.sigwait(signals))}\n".encode())
"""


class EndedError(Exception):
    """Ends the process before step 4, and after it."""


def _group(group: TrajectoryGroup) -> TrajectoryGroup:
    if group.group_id != OUTLIER:
        return group
    second = np.arange(len(group.tokens)) >= group.lengths[0]
    return dataclasses.replace(group, logprobs=np.where(second & group.mask, -20, group.logprobs).astype(np.float32))


@pytest.fixture(scope="module")
def run(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A run with checkpoints of steps 2 and 4, whose trainer was killed after step 3."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    groups = [_group(group) for step in range(1, STEPS + 1) for group in step_groups(step)]
    trainer = Trainer(ModelSource(str(model_dir), str(model_dir), None, 512), folder, ApiStandIn(groups))
    trainer.settings = SKIPS.model_copy(update={"checkpoint_interval": 2})
    for last in (3, STEPS):

        def leased(step: int, last: int = last) -> None:
            if step > last:
                raise EndedError

        trainer.leased = leased
        trainer.api.ready += [] if last == 3 else step_groups(STEPS + 1)
        with pytest.raises(EndedError):
            trainer.run()
        trainer.api.ready = [group for group in groups if group.group_id not in trainer.api.acked]
        trainer.api.leased = {}
    with closing(RunWriter(folder / "rollouts", "run", 0, 1 << 30)) as archive:
        for group in groups:
            archive.append(group.group_id, "group", group.encode())
        archive.sync()
    return RecordedRun.open(RunFolder.open(folder), folder, trust=True)


def test_recorded_settings_give_every_checkpoint_bit_for_bit(run: RecordedRun, tmp_path: Path) -> None:
    verdict = verify(run, Request({}), lambda text: None)
    assert (verdict.compared, verdict.step, verdict.files) == (2, None, [])
    found = retrain(run, Request({}), tmp_path / "again", lambda text: None)
    assert found == verdict


def test_checkpoint_whose_groups_changed_is_the_first_that_differs(run: RecordedRun, tmp_path: Path) -> None:
    last = run.checkpoints[-1]
    fewer = {**last.batches, STEPS: last.batches[STEPS][:-1]}
    records = [*run.checkpoints[:-1], msgspec.structs.replace(last, batches=fewer)]
    changed = RecordedRun(run.folder, records, run.groups, tmp_path, trust=True)
    verdict = verify(changed, Request({}), lambda text: None)
    assert (verdict.compared, verdict.step) == (1, 4)
    assert {"model.safetensors", "optimizer.pt"} <= set(verdict.files)
    found = retrain(changed, Request({}), tmp_path / "again", lambda text: None)
    assert found is not None
    assert (found.step, found.files, found.causes) == (4, verdict.files, {})


def test_run_is_named_before_its_hyperparameters(tmp_path: Path) -> None:
    def opened(run: str) -> RunFolder:
        assert run == "quickstart"
        raise EndedError

    here = Here([tmp_path], tmp_path, "", None, opened, None)
    for flag in ("--learning_rate", "--objective"):
        with raises(ReplayError, "run_first", flag=flag):
            main("retrain", [flag, "1e-5", "quickstart"], here)
    flag_last, own_flag, with_value = ["quickstart", "--learning_rate", "1"], ["--at", "1"], ["--learning_rate=1"]
    for arguments in (flag_last, [*own_flag, "quickstart"], [*with_value, "quickstart"]):
        with pytest.raises(EndedError):
            main("retrain", arguments, here)


@pytest.mark.parametrize("content", [None, "", "[]", '{"run": "other"}'])
def test_folder_of_something_else_is_not_removed(run: RecordedRun, tmp_path: Path, content: str | None) -> None:
    out = tmp_path / "again"
    out.mkdir()
    if content is not None:
        (out / "retrain.json").write_text(content)
    with raises(ReplayError, "folder_taken", folder=out):
        retrain(run, Request({}), out, lambda text: None)
    assert out.exists()


def test_earlier_retraining_stays_until_another_one_can_begin(run: RecordedRun, tmp_path: Path) -> None:
    out = tmp_path / "again"
    out.mkdir()
    (out / "retrain.json").write_text('{"run": "run"}')
    untrusted = RecordedRun(run.folder, run.checkpoints, run.groups, tmp_path)
    with raises(ModelError, "model_missing"):
        retrain(untrusted, Request({}), out, lambda text: None)
    without_groups = RecordedRun(run.folder, run.checkpoints, GroupIndex([], 0), tmp_path, trust=True)
    with raises(ReplayError, "groups_missing", step=1):
        retrain(without_groups, Request({}), out, lambda text: None)
    assert (out / "retrain.json").is_file()
    verdict = retrain(run, Request({}, until=1), out, lambda text: None)
    assert verdict is not None
    assert (verdict.compared, "all 0" in verdict.report()[0]) == (0, False)


def test_own_checkpoint_is_not_taken_for_the_one_of_an_earlier_run(run: RecordedRun, tmp_path: Path) -> None:
    """The trainer renamed the earlier one when it reached the same step."""
    first = run.checkpoints[0]
    own = run.on_disk()[0]
    folder = str(run.folder.folders[0] / "checkpoints" / f"step-{own.step:06d}")
    named = msgspec.structs.replace(first, progress=dataclasses.replace(first.progress, origin=folder))
    resumed = RecordedRun(run.folder, [named, *run.checkpoints[1:]], run.groups, tmp_path, trust=True)
    with raises(ReplayError, "origin_missing"):
        resumed.load_origin()


def test_model_that_only_the_record_names_is_used_only_if_it_is_trusted(run: RecordedRun, tmp_path: Path) -> None:
    untrusted = RecordedRun(run.folder, run.checkpoints, run.groups, tmp_path)
    model = run.checkpoints[0].trainer.model
    with raises(ModelError, "model_missing", model=model):
        bisect(untrusted, "importance.max", 3, lambda text: None)
    named = RecordedRun(run.folder, run.checkpoints, run.groups, tmp_path, model=model)
    assert bisect(named, "importance.max", 3, lambda text: None).group.group_id == OUTLIER


def test_loss_of_the_user_is_recorded_and_used_again_if_it_is_trusted(run: RecordedRun, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def half(tokens):\n    return -0.5 * tokens.advantages * tokens.logprobs\n")
    settings = TrainerSettings(policy_loss=f"{tmp_path}/mine.py:half")
    facts = TrainerFacts.of(LearnerPlan(SOURCE, None, settings, None), torch.device("cpu"), ranks=1, max_staleness=None)
    recorded = {**run.checkpoints[0].trainer.settings, "policy_loss": facts.settings["policy_loss"]}
    records = [
        msgspec.structs.replace(one, trainer=msgspec.structs.replace(one.trainer, settings=recorded))
        for one in run.checkpoints
    ]
    verdict = verify(RecordedRun(run.folder, records, run.groups, tmp_path, trust=True), Request({}), lambda text: None)
    assert (verdict.step, "model.safetensors" in verdict.files) == (2, True), "the run was trained with another loss"
    with raises(UntrustedError, "untrusted_record", settings=["policy_loss"]):
        RecordedRun(run.folder, records, run.groups, tmp_path).settings(1)


@pytest.mark.parametrize("at", [1, 2])
def test_other_settings_act_after_their_step(run: RecordedRun, tmp_path: Path, at: int) -> None:
    """The checkpoint of step 2 is on disk, and step 1 has none."""
    original = {row["step"]: row for row in read_jsonl(run.folder.folders[0] / METRICS_FILE)}
    out = tmp_path / "again"
    request = Request({"learning_rate": 3e-3}, at=at, force=True)
    assert retrain(run, request, out, lambda text: None) is None
    rows = {row["step"]: row for row in read_jsonl(out / METRICS_FILE)}
    assert list(rows) == list(range(1 if at == 1 else 3, STEPS + 1))
    for step, row in rows.items():
        factor = 0.3 if step > at else 1.0
        assert row["learning_rate"] == pytest.approx(factor * original[step]["learning_rate"])
    assert rows[3]["effective_sample_size"] <= 1
    assert rows[STEPS]["loss"] != original[STEPS]["loss"]
    assert json.loads((out / "retrain.json").read_text())["settings"] == {"learning_rate": 3e-3}


def test_bisect_finds_the_outlier_of_a_step(run: RecordedRun, tmp_path: Path) -> None:
    with raises(ReplayError, "metric_unknown"):
        bisect(run, "reward_mean", 3, lambda text: None)
    found = bisect(run, "importance.max", 3, lambda text: None)
    row = next(row for row in read_jsonl(run.folder.folders[0] / METRICS_FILE) if row["step"] == 3)
    assert found.value == row["importance"]["max"]
    assert found.usual < found.value
    assert (found.group.group_id, found.sequence.group_id, found.sequence.sequence) == (OUTLIER, OUTLIER, 1)


def test_fork_of_a_pruned_step_trains_up_to_it_again(run: RecordedRun, tmp_path: Path) -> None:
    said: list[str] = []
    for step in (2, 3):
        copy_checkpoint(run, step, tmp_path / str(step), said.append)
    assert (tmp_path / "2" / "model.safetensors").read_bytes() == (
        run.folder.folders[0] / "checkpoints/step-000002/model.safetensors"
    ).read_bytes()
    assert json.loads((tmp_path / "3" / "trainer_state.json").read_text())["step"] == 3
    assert len(said) == 1, "no checkpoint of the way there differs"


LOSS, REFERENCE = "mine.py:loss", "some/reference"


@pytest.fixture
def with_a_loss(run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """The run, as if its trainer had had settings that only a trainer may set. Not trusted."""
    record = RunRecord.model_construct(
        run_id="run", state=RunState.FINISHED, env={"dataset": {"prompt_field": "question"}}, group_size=2
    )
    monkeypatch.setattr(RunFolder, "record", lambda self: record)
    given = {"policy_loss": LOSS, "ref_model": REFERENCE, "publisher": "none", "device": "cpu"}
    checkpoints = [
        msgspec.structs.replace(
            one, trainer=msgspec.structs.replace(one.trainer, settings=one.trainer.settings | given)
        )
        for one in run.checkpoints
    ]
    return RecordedRun(run.folder, checkpoints, run.groups, tmp_path)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"policy_loss": LOSS, "ref_model": REFERENCE, "publisher": "none"}),
        (
            {"policy_loss": "other.py:loss", "publisher": "filesystem"},
            {"policy_loss": "other.py:loss", "ref_model": REFERENCE, "publisher": "filesystem"},
        ),
    ],
)
def test_fork_takes_over_what_only_a_trainer_may_set(
    with_a_loss: RecordedRun, tmp_path: Path, own: dict[str, str], expected: dict[str, str]
) -> None:
    with_a_loss.trust = True
    folder = tmp_path / "forked"
    settings = {"learning_rate": 0.5, **own}
    fork = prepare(with_a_loss, 2, settings, folder, tmp_path, lambda text: None)
    flags = parse_flags(fork.flags, TrainerSettings, "trainer")
    assert flags == {"resume": str(folder / "origin" / "step-000002"), **expected}
    config = yaml.safe_load(fork.config.read_text())
    trainer = config.pop("trainer")
    assert (trainer["learning_rate"], trainer["training_steps"]) == (0.5, SKIPS.training_steps - 2)
    assert TRAINER_ONLY.isdisjoint(trainer)
    assert trainer["clip_epsilon_high"] is None, "another trainer.yaml may have a value"
    assert "token_budget" not in trainer, "another machine may need one"
    assert not TRAINER_ONLY.intersection(config), "the environment does not know them"


def test_fork_of_an_extended_run_has_the_steps_that_are_left_of_all(
    with_a_loss: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_a_loss.trust = True
    last = with_a_loss.checkpoints[-1]
    settings = {**last.trainer.settings, "training_steps": 100}
    extended = msgspec.structs.replace(last, trainer=msgspec.structs.replace(last.trainer, settings=settings))
    run = RecordedRun(
        with_a_loss.folder, [*with_a_loss.checkpoints[:-1], extended], with_a_loss.groups, tmp_path, trust=True
    )
    fork = prepare(run, 2, {}, tmp_path / "forked", tmp_path, lambda text: None)
    assert yaml.safe_load(fork.config.read_text())["trainer"]["training_steps"] == 98


def test_asterisks_of_a_text_are_not_a_masked_secret(with_a_loss: RecordedRun, tmp_path: Path) -> None:
    with_a_loss.trust = True
    masked = {"dataset.system_prompt": "***"}
    with raises(ReplayError, "secret_missing", settings=["dataset.system_prompt"]):
        prepare(with_a_loss, 2, masked, tmp_path / "forked", tmp_path, lambda text: None)
    prompt = {"dataset.system_prompt": "***Note*** answer in *** or less"}
    prepare(with_a_loss, 2, prompt, tmp_path / "forked", tmp_path, lambda text: None)


def test_code_of_a_fork_is_named_by_its_whole_path(
    with_a_loss: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_a_loss.trust = True
    (here := tmp_path / "here").mkdir()
    (configs := tmp_path / "configs").mkdir()
    monkeypatch.chdir(here)
    (here / "agent.py").touch()
    (configs / "mine.py").touch()
    rewards = ["mine.py:close", {"type": "gone.py:close"}, "accuracy"]
    settings = {"dataset.reward_functions": rewards, "agent.function": "agent.py:run"}
    fork = prepare(with_a_loss, 2, settings, tmp_path / "forked", configs, lambda text: None)
    config = yaml.safe_load(fork.config.read_text())
    assert config["dataset"]["reward_functions"] == [f"{configs}/mine.py:close", {"type": "gone.py:close"}, "accuracy"]
    assert config["agent"]["function"] == f"{here}/agent.py:run"


def test_settings_of_a_fork_have_the_names_of_a_configuration(with_a_loss: RecordedRun, tmp_path: Path) -> None:
    with_a_loss.trust = True
    settings = {"trainer.learning_rate": 0.5, "trainer.ref_model": "own", "dataset.temperature": 0.7}
    fork = prepare(with_a_loss, 2, settings, tmp_path / "forked", tmp_path, lambda text: None)
    config = yaml.safe_load(fork.config.read_text())
    assert (config["trainer"]["learning_rate"], fork.settings["ref_model"]) == (0.5, "own")
    assert config["dataset"]["temperature"] == 0.7
    for wrong, name in (
        ({"run_id": "other"}, "run_id"),
        ({"trainer.learnin_rate": 1}, "trainer.learnin_rate"),
        ({"dataset": "x", "dataset.temperature": 1}, "dataset.temperature"),
    ):
        with raises(ReplayError, "fork_setting", setting=name):
            prepare(with_a_loss, 2, wrong, tmp_path / "other", tmp_path, lambda text: None)


@pytest.mark.slow
def test_fork_reports_a_token_that_the_api_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ApiError("unauthorized", 401, "a token is missing", "")

    monkeypatch.setattr(SyncClient, "open_run", refuse)
    with raises(ApiError, "unauthorized"):
        can_start("http://127.0.0.1:8000", "wrong")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_services_of_a_fork_get_one_signal(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C goes to the process group of the command. With that signal and the command's own SIGTERM, the trainer
    would end before its last checkpoint."""
    for name in ("gristmill_trainer", "gristmill_env"):
        package = tmp_path / "stubs" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(SERVICE)
    start = "from gristmill_trainer.replay.fork import Fork, start; from pathlib import Path; import os\n"
    start += f"os.environ['PYTHONPATH'] = {str(tmp_path / 'stubs')!r}\n"
    start += "start(Fork('f', Path('f.yaml'), Path('c'), {}), 'http://api', Path('runs'))"
    command = subprocess.Popen(
        [sys.executable, "-c", start], cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    try:
        ready = [command.stdout.readline() for _ in range(2)]
        os.killpg(command.pid, number)
        stopped = command.stdout.read().splitlines()  # to the end of every process that has the pipe
    finally:
        command.terminate()
        command.communicate()
    assert ready == ["ready\n"] * 2
    assert stopped == ["stopped by 15"] * 2


def test_fork_of_a_record_with_code_needs_trust_or_a_value_of_ones_own(
    with_a_loss: RecordedRun, tmp_path: Path
) -> None:
    folder = tmp_path / "forked"
    with raises(UntrustedError, "untrusted_record", settings=["ref_model", "policy_loss"]):
        prepare(with_a_loss, 2, {}, folder, tmp_path, lambda text: None)
    assert not folder.exists()
    own = {"policy_loss": "own.py:loss", "ref_model": "own/reference"}
    fork = prepare(with_a_loss, 2, own, folder, tmp_path, lambda text: None)
    assert fork.settings == {**own, "publisher": "none"}
