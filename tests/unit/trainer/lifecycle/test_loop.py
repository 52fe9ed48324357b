"""The loop, with a real learner and real checkpoints: the state that it saves when it ends early."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from tests.unit.trainer.lifecycle.api_stand_in import ApiStandIn
from tests.unit.trainer.lifecycle.conftest import SETTINGS, StandInTransport, prepare, step_groups

from gristmill import ApiError, ApiUnreachable, LeaseSession, PolicyVersion, TrajectoryGroup
from gristmill.internal.lines import JsonlWriter, read_jsonl
from gristmill.internal.metrics import MAX_TEXT, METRICS_FILE
from gristmill.internal.stall import StallGuard
from gristmill_trainer.batch_source import Batch, BatchSource
from gristmill_trainer.checkpoint.background import BackgroundSave
from gristmill_trainer.checkpoint.digests import DigestWriter, TrainerFacts
from gristmill_trainer.checkpoint.store import CheckpointStore, find_resumption
from gristmill_trainer.display import Display
from gristmill_trainer.dist_context import DistContext
from gristmill_trainer.errors import PublishError, TrainerError, WeightsError
from gristmill_trainer.export import RunFacts
from gristmill_trainer.hooks import Hook, StepEvent
from gristmill_trainer.learner import Learner
from gristmill_trainer.learner_factory import LearnerPlan, build_learner
from gristmill_trainer.loop import train
from gristmill_trainer.metrics import step_metrics
from gristmill_trainer.observers import Observers
from gristmill_trainer.policy import ModelSource
from gristmill_trainer.publish.publisher import FilesystemTransport, Publisher
from gristmill_trainer.quarantine import SkippedSteps
from gristmill_trainer.run import announce
from gristmill_trainer.startup import STALL
from gristmill_trainer.stop import StoppedError, StopRequest
from gristmill_trainer.training import Batches, Finish, Ledger, MainRank, Phases, Reports, Training
from gristmill_trainer.watchdog import Wanted, Watchdog

SKIPS = SETTINGS.model_copy(
    update={"training_steps": 10, "checkpoint_interval": 100, "max_skipped_steps": 2, "publisher": "none"}
)


class _Source(BatchSource):
    def __init__(self, session: LeaseSession, leased: Callable[[int], object]) -> None:
        super().__init__(session, prepare)
        self._told = leased

    def get(self, step: int, wait: float) -> Batch | None:
        batch = super().get(step, wait)
        self._told(step)
        return batch


class Trainer:
    """One process of a training after the other, in one run folder."""

    def __init__(self, source: ModelSource, folder: Path, api: ApiStandIn) -> None:
        self.source, self.folder, self.api = source, folder, api
        self.transport: FilesystemTransport | None = None
        self.settings = SKIPS
        self.grace = 50.0
        self.servers_sleep = False
        self.leased: Callable[[int], object] = lambda step: None
        """Called with a step whose groups are available."""
        self.hook: Hook | None = None
        self.restores = True
        """Whether a resumed process continues with the optimizer's state, and so with its learning rate."""

    def run(self) -> None:
        """Assembles the loop as startup.py does."""
        stop = StopRequest(self.grace)
        store = CheckpointStore(self.folder / "checkpoints", 2, "c0ffee")
        resumption = find_resumption(store, "auto")
        skipped = SkippedSteps(self.settings.max_skipped_steps, resumption.skipped)
        skipped.raise_if_too_many()
        dist = DistContext()
        plan = LearnerPlan(self.source, resumption.weights, self.settings, None)
        learner, state = build_learner(plan, dist)
        if resumption.checkpoint is not None and self.restores:
            store.restore(resumption.checkpoint, state)
        first_step = resumption.step
        metrics = JsonlWriter(self.folder / METRICS_FILE, keep=lambda row: bool(row["step"] <= first_step))
        guard = StallGuard("trainer", STALL)
        facts = TrainerFacts.of(plan, learner.policy.device, ranks=1, max_staleness=None)
        digests = DigestWriter(self.folder, facts, 0.0, resumption.version)
        with (
            contextlib.closing(guard),
            contextlib.closing(digests),
            LeaseSession(self.api.client, "run", {}, creation="c0ffee") as session,
            stop.stop_on_timeout(),
            metrics,
            contextlib.closing(Display(self.settings.training_steps, first_step)) as display,
        ):
            main = MainRank(
                session=session,
                batches=Batches(_Source(session, self.leased), Watchdog(self.api.client, "run", Wanted(2), [])),
                ledger=Ledger(session, digests, self.folder / "aside", skipped, origin=None),
                saving=BackgroundSave(first_step),
                reports=Reports(
                    session,
                    self.folder,
                    metrics,
                    display,
                    Observers(),
                    partial(step_metrics, device=learner.policy.device),
                ),
                publisher=Publisher(self.transport, partial(announce, session), stop),
                receipts=None,
                servers=(),
                hook=self.hook,
                finish=Finish(cast("RunFacts", None), hub=None),
                stop=stop,
                guard=guard,
                noticing_replacement=contextlib.nullcontext,
            )
            phases, sleep = Phases(guard), self.servers_sleep
            train(
                Training(self.settings, dist, learner, state, store, phases, first_step, self.folder, main, sleep)
            )  # fmt: skip


def _steps(steps: Sequence[int], spoil: Callable[[TrajectoryGroup], TrajectoryGroup]) -> list[TrajectoryGroup]:
    groups = [group for step in range(1, 10) for group in step_groups(step)]
    return [spoil(group) if index // 2 + 1 in steps else group for index, group in enumerate(groups)]


def _all_unknown(group: TrajectoryGroup) -> TrajectoryGroup:
    return dataclasses.replace(group, tokens=group.tokens + np.int32(10**6))


@pytest.fixture
def source(model_dir: Path) -> ModelSource:
    return ModelSource(str(model_dir), str(model_dir), None, 512)


def test_loop_counts_skipped_steps_across_restarts(source: ModelSource, tmp_path: Path) -> None:
    """A restart policy starts the container again forever; the trainer must not skip forever."""
    api = ApiStandIn(_steps([2, 3, 4, 5, 6, 7], _all_unknown))
    trainer = Trainer(source, tmp_path, api)
    files = [str(tmp_path / "aside" / f"step-{step:06d}.1.groups") for step in (2, 3, 4)]
    for _ in range(3):
        with raises(TrainerError, "too_many_skipped_steps", files=files):
            trainer.run()
    assert sorted(map(str, (tmp_path / "aside").glob("*.groups"))) == files
    assert api.acked == [f"g{n:08d}" for n in range(2, 10)], "settled, each once; nothing leased after"
    assert not api.leased


def test_loop_continues_a_skip_count_below_the_bound(source: ModelSource, tmp_path: Path) -> None:
    def stopped(version: PolicyVersion) -> None:
        if version.step == 3:
            signal.raise_signal(signal.SIGTERM)

    api = ApiStandIn(_steps([2, 3, 4], _all_unknown))
    trainer = Trainer(source, tmp_path, api)
    trainer.transport = _Transport(stopped)
    with pytest.raises(StoppedError):
        trainer.run()
    trainer.transport = None
    with raises(TrainerError, "too_many_skipped_steps") as raised:
        trainer.run()
    assert len(raised.value.values["files"]) == 3


class _Transport(StandInTransport):
    """Calls a function with every version."""

    def __init__(self, called: Callable[[PolicyVersion], object]) -> None:
        super().__init__()
        self._called = called

    def publish(self, tensors: object, version: PolicyVersion) -> None:
        self._called(version)


def test_loop_stopped_without_a_model_server_keeps_the_finished_steps(source: ModelSource, tmp_path: Path) -> None:
    def away(version: PolicyVersion) -> None:
        if version.step == 2:
            signal.raise_signal(signal.SIGTERM)
            raise PublishError("model_server_unreachable", "it did not answer")

    api = ApiStandIn(_steps([], _all_unknown))
    trainer = Trainer(source, tmp_path, api)
    trainer.transport = _Transport(away)
    with raises(StoppedError, "stopped", problem="model_server_unreachable"):
        trainer.run()
    resumption = find_resumption(CheckpointStore(tmp_path / "checkpoints", 2, "c0ffee"), "auto")
    assert resumption.step == 2
    assert api.acked == resumption.covered == [f"g{n:08d}" for n in range(2, 6)]


def test_loop_stopped_without_an_api_keeps_the_finished_steps(source: ModelSource, tmp_path: Path) -> None:
    def away(version: PolicyVersion) -> None:
        if version.step == 2:
            signal.raise_signal(signal.SIGTERM)
            api.error = ApiUnreachable("api_unreachable", "the API did not answer")

    api = ApiStandIn(_steps([], _all_unknown))
    trainer = Trainer(source, tmp_path, api)
    trainer.transport = _Transport(away)
    with raises(StoppedError, "stopped", problem="api_unreachable"):
        trainer.run()
    resumption = find_resumption(CheckpointStore(tmp_path / "checkpoints", 2, "c0ffee"), "auto")
    assert resumption.step == 2
    assert [row["step"] for row in read_jsonl(tmp_path / METRICS_FILE)] == [1, 2]


def test_trainer_of_a_suspended_run_keeps_the_finished_steps(source: ModelSource, tmp_path: Path) -> None:
    """The API refuses its leases and acks. The checkpoint names the groups for the trainer that resumes the run."""

    def suspend(version: PolicyVersion) -> None:
        if version.step == 2:
            api.error = ApiError("suspended", 409, "another run took the stack")

    api = ApiStandIn(_steps([], _all_unknown))
    trained = [group.group_id for group in api.ready[:4]]
    trainer = Trainer(source, tmp_path, api)
    trainer.transport = _Transport(suspend)
    with raises(ApiError, "suspended"):
        trainer.run()
    resumption = find_resumption(CheckpointStore(tmp_path / "checkpoints", 2, "c0ffee"), "auto")
    assert (resumption.step, resumption.covered, api.acked) == (2, trained, [])


def test_checkpointed_step_has_its_metrics_wherever_the_process_ends(source: ModelSource, tmp_path: Path) -> None:
    def killed(version: PolicyVersion) -> None:
        if version.step == 2:
            raise KeyboardInterrupt

    api = ApiStandIn(_steps([], _all_unknown))
    trainer = Trainer(source, tmp_path, api)
    trainer.settings = SKIPS.model_copy(update={"checkpoint_interval": 1, "training_steps": 3})
    trainer.transport = _Transport(killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    trainer.transport = _Transport(lambda version: None if version.step < 3 else killed(PolicyVersion(1, 2)))
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert [row["step"] for row in read_jsonl(tmp_path / METRICS_FILE)] == api.rows == [1, 2, 3]


def test_loop_returns_a_step_that_cannot_end_in_time(source: ModelSource, tmp_path: Path) -> None:
    api = ApiStandIn(_steps([], _all_unknown))
    trainer = Trainer(source, tmp_path, api)
    trainer.grace = 0.0
    trainer.leased = lambda step: signal.raise_signal(signal.SIGTERM) if step == 3 else None
    with raises(StoppedError, "stopped", given_back=3):
        trainer.run()
    assert not api.leased
    assert api.ready[0].group_id == "g00000006", "in its place"
    resumption = find_resumption(CheckpointStore(tmp_path / "checkpoints", 2, "c0ffee"), "auto")
    assert resumption.step == 2
    assert api.acked == resumption.covered == [f"g{n:08d}" for n in range(2, 6)]


class _Sleeping(_Transport):
    """Notes versions, sleeps and awakenings."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        super().__init__(lambda version: self.calls.append(str(version.step)))
        self.servers.wake = self.wake

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> list[str]:
        self.calls.append("wake")
        return ["http://model:9001"]


@pytest.mark.parametrize("sleeps", [False, True])
def test_servers_sleep_during_each_step_and_are_woken_after_an_unfinished_step(
    source: ModelSource, tmp_path: Path, sleeps: bool
) -> None:
    trainer = Trainer(source, tmp_path, ApiStandIn(_steps([], _all_unknown)))
    trainer.grace, trainer.servers_sleep, trainer.transport = 0.0, sleeps, (transport := _Sleeping())
    trainer.leased = lambda step: signal.raise_signal(signal.SIGTERM) if step == 3 else None
    with raises(StoppedError, "stopped", given_back=3):
        trainer.run()
    expected = ["0", "sleep", "1", "sleep", "2", "sleep", "wake"]
    assert transport.calls == (expected if sleeps else [call for call in expected if call.isdecimal()])


def test_error_within_a_step_keeps_none_of_its_memory_while_servers_wake(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server cannot wake on a GPU that the tensors of the step fill."""
    kept: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    class Transport(_Sleeping):
        def wake(self) -> list[str]:
            alive.extend(one() is not None for one in kept)
            return super().wake()

    def inner() -> None:
        activations = torch.zeros(1)
        kept.append(weakref.ref(activations))
        raise KeyError

    def fail(learner: Learner) -> None:
        activations = torch.zeros(1)
        kept.append(weakref.ref(activations))
        try:
            inner()
        except KeyError as cause:
            error = ValueError("the user's loss")
            cause.__context__ = error  # as of an error that was raised again while `error` was handled
            raise error from cause

    monkeypatch.setattr(Learner, "_clip_gradient", fail)
    trainer = Trainer(source, tmp_path, ApiStandIn(_steps([], _all_unknown)))
    trainer.servers_sleep, trainer.transport = True, (transport := Transport())
    with pytest.raises(ValueError, match="the user's loss"):
        trainer.run()
    assert transport.calls == ["0", "sleep", "wake"]
    assert alive == [False, False]


def test_loop_keeps_and_bounds_steps_with_skipped_updates(source: ModelSource, tmp_path: Path) -> None:
    """One of a step's two updates overflows, step after step."""

    def overflows(group: TrajectoryGroup) -> TrajectoryGroup:
        spoiled = int(group.group_id[1:]) % 2
        return dataclasses.replace(group, advantages=np.full(len(group.tokens), 3e38, np.float32)) if spoiled else group

    api = ApiStandIn(_steps([2, 3, 4], overflows))
    trainer = Trainer(source, tmp_path, api)
    trainer.settings = SKIPS.model_copy(update={"num_epochs": 1})
    with raises(TrainerError, "too_many_skipped_steps"):
        trainer.run()
    rows = list(read_jsonl(tmp_path / METRICS_FILE))
    assert [(row["step"], row.get("updates_left_out"), row.get("skipped")) for row in rows] == [
        (1, 0, None),
        (2, 1, None),
        (3, 1, None),
        (4, 1, None),
    ]
    names = [path.name for path in sorted((tmp_path / "aside").glob("*.groups"))]
    assert names == [f"step-{step:06d}.1.groups" for step in (2, 3, 4)]


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize(
    ("learning_rate", "code"), [(1e18, "weights_give_nan"), (1e37, "weights_give_nan"), (1e39, "weights_not_finite")]
)
def test_weights_that_give_no_numbers_are_neither_published_nor_saved(
    source: ModelSource, tmp_path: Path, learning_rate: float, code: str, lora_rank: int
) -> None:
    """Loss and gradient of the step are finite. The groups return, and the next trainer has the last checkpoint."""
    served: list[PolicyVersion] = []
    api = ApiStandIn(_steps([], _all_unknown))
    trainer = Trainer(source, tmp_path, api)
    trainer.transport = _Transport(served.append)
    one = {"lora_rank": lora_rank, "num_epochs": 1, "minibatches": 1, "warmup_steps": 0}
    trainer.settings = SKIPS.model_copy(update={**one, "training_steps": 2, "checkpoint_interval": 1})
    trainer.leased = _end_after(1)
    with pytest.raises(_EndedError):
        trainer.run()
    trainer.leased = lambda step: None
    trainer.restores = False
    trainer.settings = SKIPS.model_copy(update={**one, "learning_rate": learning_rate, "checkpoint_interval": 1})
    with raises(WeightsError, code, step=2) as raised:
        trainer.run()
    assert "learning_rate" in str(raised.value)
    assert {version.step for version in served} == {0, 1}
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-000001"]
    assert api.acked == [group.group_id for group in step_groups(1)], "the groups of step 2 return"
    assert [row["step"] for row in read_jsonl(tmp_path / METRICS_FILE)] == [1, 2], "the step that diverged is visible"


class _EndedError(Exception):
    pass


def _end_after(step: int) -> Callable[[int], object]:
    def leased(now: int) -> None:
        if now > step:
            raise _EndedError

    return leased


def test_on_step_is_called_after_each_step_is_served(source: ModelSource, tmp_path: Path) -> None:
    served: list[PolicyVersion] = []
    seen: list[tuple[int, int]] = []

    def hook(event: StepEvent) -> None:
        seen.append((PolicyVersion.parse(event.metrics.policy_version).step, served[-1].step))
        if len(seen) == 3:
            raise ValueError("enough")

    trainer = Trainer(source, tmp_path, ApiStandIn(_steps([], _all_unknown)))
    trainer.transport, trainer.hook = _Transport(served.append), hook
    with pytest.raises(ValueError, match="enough"):
        trainer.run()
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_loop_starts_no_work_on_a_step_after_a_stop_request(source: ModelSource, tmp_path: Path) -> None:
    """A hook may take minutes, which count as part of the grace period."""
    hooked: list[int] = []

    def stopped(version: PolicyVersion) -> None:
        if version.step == 2:
            signal.raise_signal(signal.SIGTERM)

    trainer = Trainer(source, tmp_path, ApiStandIn(_steps([], _all_unknown)))
    trainer.transport, trainer.hook = _Transport(stopped), lambda event: hooked.append(event.metrics.step)
    with pytest.raises(StoppedError):
        trainer.run()
    assert hooked == [1]
    resumption = find_resumption(CheckpointStore(tmp_path / "checkpoints", 2, "c0ffee"), "auto")
    assert resumption.step == 2


@pytest.mark.parametrize(("code", "status"), [("bad_request", 422), ("too_large", 413), ("too_many_sources", 409)])
def test_metrics_row_that_the_api_refuses_is_in_the_runs_folder(
    source: ModelSource, tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, status: int
) -> None:
    api = ApiStandIn(_steps([], _all_unknown))
    api.refusal = ApiError(code, status, "values.reward_parts: a name of 129 characters")
    trainer = Trainer(source, tmp_path, api)

    def enough(event: StepEvent) -> None:
        if event.metrics.step == 2:
            api.refusal = ApiError("run_missing", 404, "there is no run 'run'")

    trainer.hook = enough
    with raises(ApiError, "run_missing"):
        trainer.run()
    assert [row["step"] for row in read_jsonl(tmp_path / METRICS_FILE)] == [1, 2, 3]
    told = [record.message for record in caplog.records if "a name of 129 characters" in record.message]
    assert [re.findall(r"step (\d+)", text) for text in told] == [["1"], ["2"]]


def test_long_text_of_a_metrics_row_is_whole_in_the_file_alone(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a step without memory, with PyTorch's message."""

    def fail(learner: Learner) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. " + "Tried to allocate " * 20)

    monkeypatch.setattr(Learner, "_clip_gradient", fail)
    api = ApiStandIn(_steps([], _all_unknown))
    trainer = Trainer(source, tmp_path, api)
    trainer.settings = SKIPS.model_copy(update={"max_skipped_steps": 0})
    with raises(TrainerError, "too_many_skipped_steps"):
        trainer.run()
    (row,), (sent,) = read_jsonl(tmp_path / METRICS_FILE), api.values
    assert len(row["skipped"]) > MAX_TEXT
    assert sent["skipped"] == row["skipped"][:MAX_TEXT]
