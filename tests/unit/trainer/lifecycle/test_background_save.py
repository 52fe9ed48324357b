"""A thread writes a checkpoint while the trainer takes its next steps. Its groups get their ack once it is durable."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.support.errors import raises
from tests.unit.trainer.lifecycle.api_stand_in import ApiStandIn
from tests.unit.trainer.lifecycle.conftest import SETTINGS, StandInTransport, Training, progress, step_groups
from tests.unit.trainer.lifecycle.test_loop import SKIPS, Trainer

from gristmill import ApiError, ApiUnreachable, PolicyVersion
from gristmill_trainer.checkpoint import background, store
from gristmill_trainer.checkpoint.background import BackgroundSave
from gristmill_trainer.checkpoint.digests import file_digests, read_digests
from gristmill_trainer.checkpoint.store import CheckpointStore, Resumption, find_resumption, read_progress
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import CheckpointError, FencedError, PublishError
from gristmill_trainer.hooks import StepEvent
from gristmill_trainer.learner_factory import LearnerPlan, build_learner
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.quarantine import SkippedSteps
from gristmill_trainer.stop import StoppedError
from gristmill_trainer.training import Ledger

SECOND_STEPS = SKIPS.model_copy(update={"checkpoint_interval": 2})


class EndedError(Exception):
    """Ends a training after its fourth step."""


class Disk:
    """Holds each checkpoint that a thread writes, until a caller waits for it or `released` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, at: str) -> None:
        """`at`: "_write", before any file, or "write_manifest", with the other files on disk."""
        self.reached, self.released = threading.Event(), threading.Event()
        self.error: OSError | None = None
        """Raised in place of the write."""
        self.writes = 0
        write, join = getattr(store, at), BackgroundSave.join

        def held(*arguments: Any) -> None:
            self.writes += 1
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.released.wait(60), "no caller waits for the checkpoint"
            if self.error is not None:
                raise self.error
            write(*arguments)

        def joined(saving: BackgroundSave) -> int | None:
            if saving.pending:  # A trainer that does not join never sees the checkpoint's end.
                self.released.set()
            return join(saving)

        patch.setattr(store, at, held)
        patch.setattr(BackgroundSave, "join", joined)


class Api(ApiStandIn):
    """Also keeps a copy of the run's folder at each ack, as a kill just before the ack would leave it."""

    def __init__(self, run: Path, copies: Path) -> None:
        super().__init__(group_of(1, 2, 3, 4, 5))
        self.run, self.copies = run, copies
        self.acks: list[list[str]] = []
        self.answers_acks = True

    def ack(self, run_id: str, incarnation: int, batch_ids: Sequence[str], **named: Any) -> None:
        if not self.answers_acks:
            raise ApiUnreachable("api_unreachable", "the API did not answer")
        shutil.copytree(self.run, self.copies / str(len(self.acks)))
        self.acks.append(list(batch_ids))
        super().ack(run_id, incarnation, batch_ids, **named)


class Transport(StandInTransport):
    """Remembers the step of the last publication."""

    served = 0

    def publish(self, tensors: object, version: PolicyVersion) -> None:
        self.served = version.step


class Clock:
    """Replaces the module `time` of the code under test."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def group_of(*steps: int) -> list[Any]:
    return [group for step in steps for group in step_groups(step)]


def ids(*steps: int) -> list[str]:
    return [group.group_id for group in group_of(*steps)]


def resumption(run: Path) -> Resumption:
    return find_resumption(CheckpointStore(run / "checkpoints", 2, "c0ffee"), "auto")


def wait_for_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(60)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch, "write_manifest")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(background, "time", clock)
    return clock


@pytest.fixture
def api(tmp_path: Path) -> Api:
    return Api(tmp_path / "run", tmp_path / "copies")


@pytest.fixture
def trainer(model_dir: Path, api: Api) -> Trainer:
    trainer = Trainer(ModelSource(str(model_dir), str(model_dir), None, 512), api.run, api)
    trainer.settings = SECOND_STEPS
    trainer.leased = end_after_four
    return trainer


def end_after_four(step: int) -> None:
    if step > 4:
        raise EndedError


def after(step: int, call: Callable[[], object]) -> Callable[[StepEvent], object]:
    return lambda event: call() if event.metrics.step == step else None


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_checkpoint_of_a_thread_has_the_bytes_of_its_step(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora_rank: int
) -> None:
    """Twice, because the second copy of the state takes the memory of the first."""
    disk = Disk(monkeypatch, "_write")
    settings = SETTINGS.model_copy(update={"lora_rank": lora_rank})
    source = ModelSource(str(model_dir), str(model_dir), None, 512)
    training = Training(*build_learner(LearnerPlan(source, None, settings, None), DistContext()))
    at_once, beside = CheckpointStore(tmp_path / "at once", 5), CheckpointStore(tmp_path / "beside", 5)
    saving = BackgroundSave()
    for step in (1, 3):
        training.step(step)
        expected = file_digests(at_once.save(training.state, progress(step)).path)
        staged = training.state.staged()
        assert staged is not None
        saving.begin(beside, staged, progress(step), None)
        training.step(step + 1)
        assert disk.reached.wait(60)
        assert saving.poll() is None
        assert not list(beside.folder.glob(f"step-{step:06d}"))
        assert saving.join() == step
        assert saving.join() is None
        assert file_digests(beside.folder / f"step-{step:06d}") == expected
        disk.reached.clear()
        disk.released.clear()


def test_copy_of_the_state_does_not_change_with_the_next_step(training: Training) -> None:
    training.step(1)
    staged = training.state.staged()
    assert staged is not None
    saved = {number: values["exp_avg"].clone() for number, values in staged.state()["optimizer"]["state"].items()}
    training.step(2)
    now = staged.state()["optimizer"]["state"]
    assert all(torch.equal(now[number]["exp_avg"], kept) for number, kept in saved.items())
    live = training.state.state()["optimizer"]["state"]
    assert not torch.equal(live[0]["exp_avg"], saved[0])
    again = training.state.staged()
    assert again is not None
    there = again.state()["optimizer"]["state"]
    assert torch.equal(there[0]["exp_avg"], live[0]["exp_avg"])
    assert there[0]["exp_avg"].data_ptr() == now[0]["exp_avg"].data_ptr(), "new memory would take longer than the copy"


def test_trainer_takes_a_step_while_a_checkpoint_is_written(trainer: Trainer, api: Api, disk: Disk) -> None:
    """The groups of the step belong to the next checkpoint, and a kill meanwhile leaves the checkpoint before."""
    seen: list[object] = []

    def look() -> None:
        assert disk.reached.wait(60)
        shutil.copytree(api.run, api.copies / "killed")
        seen.append((list(api.acked), [path.name for path in (api.run / "checkpoints").iterdir()]))
        disk.released.set()
        wait_for_thread()

    trainer.hook = after(3, look)
    trainer.leased = lambda step: seen.append(list(api.acked)) if step == 4 else end_after_four(step)
    with pytest.raises(EndedError):
        trainer.run()
    assert seen == [([], [".step-000002.1.2.partial"]), ids(1, 2)], "acked before step 4, in the same process"
    assert resumption(api.copies / "killed").checkpoint is None
    assert api.acks == [["1.1", "1.2"], ["1.3", "1.4"]]
    assert api.acked == ids(1, 2, 3, 4)
    for copy, step, covered in (("0", 2, ids(1, 2)), ("1", 4, ids(3, 4))):
        found = resumption(api.copies / copy)
        assert (found.step, found.covered) == (step, covered), "durable before the ack"
    rows = read_digests(api.run / "digests.jsonl")
    assert [row.batches for row in rows] == [{1: ids(1), 2: ids(2)}, {3: ids(3), 4: ids(4)}]
    assert [row.after for row in rows] == [None, "1.2"]


def test_steps_that_are_skipped_meanwhile_belong_to_the_next_checkpoint(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(creation="c")
    session: Any = SimpleNamespace(run=run, covered=["g1"], version=lambda step: PolicyVersion(1, step), batch_id=str)
    nothing: Any = None
    ledger = Ledger(session, nothing, tmp_path, SkippedSteps(5), None)
    ledger.skipped.skipped(tmp_path / "first", "the loss is nan")
    begun = ledger.progress(1)
    ledger.skipped.skipped(tmp_path / "second", "the loss is nan")
    assert begun.skipped == [str(tmp_path / "first")]
    ledger.skipped.trained()
    assert begun.skipped == [str(tmp_path / "first")]


def test_next_checkpoint_waits_for_the_previous_one(trainer: Trainer, api: Api, disk: Disk) -> None:
    trainer.settings = SECOND_STEPS.model_copy(update={"checkpoint_interval": 1})
    with pytest.raises(EndedError):
        trainer.run()
    assert api.acks == [["1.1"], ["1.2"], ["1.3"], ["1.4"]]
    written = [read_progress(api.run / "checkpoints" / f"step-00000{step}").covered for step in (3, 4)]
    assert written == [ids(3), ids(4)]


@pytest.mark.parametrize(
    ("steps", "seconds", "due"),
    [
        (0, 60, False),  # no step to save
        (1, 29, False),  # another step of 29 s ends in time
        (1, 31, True),
        (5, 49, False),
        (5, 51, True),
        (50, 58, False),
    ],
)
def test_checkpoint_is_due_if_another_step_would_exceed_the_interval(
    clock: Clock, steps: int, seconds: float, due: bool
) -> None:
    saving = BackgroundSave()
    clock.now += seconds
    assert saving.is_due(steps, 60.0) is due


def test_checkpoint_is_due_early_by_the_seconds_of_its_write(clock: Clock) -> None:
    """A kill before the checkpoint is durable costs the steps since the previous one."""
    saving = BackgroundSave()
    began = clock.now
    clock.now += 20
    saving.wrote(3, began)
    assert (saving.durable, saving.slowest) == (3, 20)
    clock.now = began + 32
    assert not saving.is_due(11, 60.0)
    clock.now = began + 36
    assert saving.is_due(11, 60.0)


def test_interval_of_time_counts_from_the_previous_checkpoint(trainer: Trainer, api: Api, clock: Clock) -> None:
    """Steps of 25 seconds: after the second one, another step would end 75 seconds after the previous checkpoint."""
    trainer.settings = SKIPS.model_copy(update={"checkpoint_interval": "1min"})

    def lease(step: int) -> None:
        wait_for_thread()
        clock.now += 25
        end_after_four(step)

    trainer.leased = lease
    with pytest.raises(EndedError):
        trainer.run()
    assert api.acks == [["1.1", "1.2"], ["1.3", "1.4"]]


def test_checkpoint_of_a_time_is_not_begun_while_one_is_written(
    trainer: Trainer, api: Api, disk: Disk, clock: Clock
) -> None:
    """A step would wait for it. An interval of steps waits, as the user wrote."""
    trainer.settings = SKIPS.model_copy(update={"checkpoint_interval": "1s"})

    def lease(step: int) -> None:
        clock.now += 25
        if step == 4:
            assert disk.reached.wait(60)
            disk.released.set()
            wait_for_thread()
        end_after_four(step)

    trainer.leased = lease
    with pytest.raises(EndedError):
        trainer.run()
    assert api.acks == [["1.1"], ["1.2", "1.3", "1.4"]]


def test_trainer_without_groups_writes_the_checkpoint_whose_time_has_come(
    trainer: Trainer, api: Api, clock: Clock
) -> None:
    """The groups of finished steps may fill the store, so that no environment can submit until they have their ack."""
    trainer.settings = SKIPS.model_copy(update={"checkpoint_interval": "1h"})
    del api.ready[len(group_of(1, 2)) :]

    polls = []

    def poll(step: int) -> None:
        if step == 3:
            polls.append(clock.now)
            clock.now += 3600
        if len(polls) == 2:
            raise EndedError

    trainer.leased = poll
    with pytest.raises(EndedError):
        trainer.run()
    assert api.acks == [["1.1", "1.2"]]
    found = resumption(api.run)
    assert (found.step, found.covered) == (2, ids(1, 2))


def test_end_of_the_training_waits_for_its_checkpoint(trainer: Trainer, api: Api, disk: Disk) -> None:
    """Before it waits for the last publication and exports the model."""
    trainer.settings = SECOND_STEPS.model_copy(update={"training_steps": 4})
    trainer.transport = transport = Transport()
    seen: list[list[str]] = []

    def prove() -> None:
        if transport.served == 4:
            seen.append(list(api.acked))
            raise EndedError

    transport.servers.prove = prove
    with pytest.raises(EndedError):
        trainer.run()
    assert seen == [ids(1, 2, 3, 4)]


def test_error_of_the_thread_ends_the_training_with_its_code(trainer: Trainer, api: Api, disk: Disk) -> None:
    disk.error = OSError(28, "No space left on device")
    disk.released.set()
    trainer.leased = lambda step: wait_for_thread()
    with raises(CheckpointError, "write_failed", path=(api.run / "checkpoints" / "step-000002").resolve()):
        trainer.run()
    assert not list((api.run / "checkpoints").iterdir())
    assert api.acks == []
    assert api.rows == [1, 2, 3], "the thread ended while step 3 was leased, and the trainer took no further step"


def test_newer_trainers_checkpoint_ends_the_training(trainer: Trainer, api: Api, disk: Disk) -> None:
    """This trainer was replaced, as while its machine slept."""
    trainer.settings = SECOND_STEPS.model_copy(update={"checkpoint_interval": 1})

    def replaced() -> None:
        disk.released.set()
        wait_for_thread()
        theirs = api.run / "checkpoints" / "step-000002"
        shutil.copytree(theirs.with_name("step-000001"), theirs)
        newer = replace(read_progress(theirs), step=2, version=PolicyVersion(2, 2))
        (theirs / "trainer_state.json").write_bytes(msgspec.json.encode(newer))

    trainer.hook = after(1, replaced)
    with raises(FencedError, "fenced", found="2.2", version="1.2"):
        trainer.run()
    assert api.acks == [["1.1"]]


def test_stop_waits_for_the_checkpoint_in_progress_and_saves_later_steps(
    trainer: Trainer, api: Api, disk: Disk
) -> None:
    trainer.hook = after(3, lambda: signal.raise_signal(signal.SIGTERM))
    with raises(StoppedError, "stopped"):
        trainer.run()
    found = resumption(api.run)
    assert found.step == 3
    assert api.acked == ids(1, 2, 3)
    assert [list(row.batches) for row in read_digests(api.run / "digests.jsonl")] == [[1, 2], [3]]
    assert sorted(path.name for path in (api.run / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert not api.leased


def test_stop_writes_no_second_checkpoint_of_the_step_in_progress(trainer: Trainer, api: Api, disk: Disk) -> None:
    trainer.hook = after(2, lambda: signal.raise_signal(signal.SIGTERM))
    with raises(StoppedError, "stopped"):
        trainer.run()
    assert api.acks == [["1.1", "1.2"]]
    assert disk.writes == 1
    assert [path.name for path in (api.run / "checkpoints").iterdir()] == ["step-000002"]


def test_stop_writes_the_last_checkpoint_once_although_its_ack_fails(trainer: Trainer, api: Api, disk: Disk) -> None:
    def stop(step: int) -> None:
        if step == 3:
            api.answers_acks = False
            signal.raise_signal(signal.SIGTERM)

    trainer.settings = SECOND_STEPS.model_copy(update={"checkpoint_interval": 100})
    trainer.leased = stop
    with raises(StoppedError, "stopped", problem="api_unreachable"):
        trainer.run()
    assert disk.writes == 1
    found = resumption(api.run)
    assert (found.step, found.covered, api.acked) == (3, ids(1, 2, 3), [])


def test_suspended_run_keeps_the_steps_after_the_checkpoint_in_progress(trainer: Trainer, api: Api, disk: Disk) -> None:
    """The API takes no ack, so the last checkpoint names the groups of both."""

    def suspend() -> None:
        api.error = ApiError("suspended", 409, "another run took the stack")

    trainer.hook = after(3, suspend)
    with raises(ApiError, "suspended"):
        trainer.run()
    found = resumption(api.run)
    assert (found.step, found.covered, api.acked) == (3, ids(1, 2, 3), [])
    assert [list(row.batches) for row in read_digests(api.run / "digests.jsonl")] == [[1, 2], [3]]


@pytest.mark.parametrize("kind", [ValueError, PublishError])
def test_error_of_the_training_does_not_lose_the_checkpoint_in_progress(
    trainer: Trainer, api: Api, disk: Disk, kind: type[Exception]
) -> None:
    """After an error of the services the next trainer names the groups. After another error they have their ack."""
    error = ValueError("enough") if kind is ValueError else PublishError("model_server_unreachable", "away")

    def fail() -> None:
        if transport.served == 3:
            raise error

    trainer.transport = transport = Transport()
    transport.servers.prove = fail
    with pytest.raises(kind):
        trainer.run()
    found = resumption(api.run)
    assert (found.step, found.covered) == (2, ids(1, 2))
    assert api.acked == (ids(1, 2) if kind is ValueError else [])
