"""One rank of a training, in every scenario: `python -m tests.unit.trainer.distributed.endings FOLDER MODEL PORTS`.
With the name of one scenario in place of PORTS, runs it in this process, as torchrun starts it.

Each rank runs all scenarios, one after the other. A scenario runs the whole trainer in a forked process, with a
stand-in for the API. Its output is FOLDER/<scenario>/rank<RANK>.log, and its exit code is rank<RANK>.code ("hangs"
after TIMEOUT). Rank 0 also writes the API's counts to api.json.

PORTS: for each scenario, the port on which the ranks meet.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from tests.support.groups import make_group
from tests.unit.trainer.lifecycle.api_stand_in import ApiStandIn
from tests.unit.trainer.lifecycle.conftest import progress, step_groups

from gristmill import ApiError, PolicyVersion, RunRecord, RunState, TrajectoryGroup
from gristmill_trainer import __main__ as trainer
from gristmill_trainer.checkpoint.contents import STATE
from gristmill_trainer.data.types import MicroBatch
from gristmill_trainer.policy.scoring import Scorer

RUN = "run"
TIMEOUT = 60.0
LONG = 15
_FLAGS = {
    "publisher": "none", "device": "cpu", "training_steps": "4", "batch_size": "4", "checkpoint_interval": "100",
    "learning_rate": "1e-2",
}  # fmt: skip


class Run(ApiStandIn):
    """The API of one run. `at`: called with the name of an event, its step and this object, in rank 0's process."""

    def __init__(self, folder: Path, at: Callable[[str, int, Run], None]) -> None:
        super().__init__([group for step in range(1, 6) for group in step_groups(step)])
        self.folder = folder
        self.state = folder / "acked"
        """Ids of the groups that earlier starts acked."""
        self.acked_before = self.state.read_text().split() if self.state.exists() else []
        self.ready = [group for group in self.ready if group.group_id not in self.acked_before]
        self.taker = ""
        self.is_open = True
        self.training_steps = 2
        self.takes = 0
        self._at = at

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes slowly, so that a rank 1 that ends first is visible. The trainer closes this object last."""
        time.sleep(0.5)
        (self.folder / "closed").touch()

    def open_run(self, wait: float, stack: str) -> RunRecord | None:
        self._at("open", 0, self)
        return self.get_run(RUN) if self.is_open else None

    def get_run(self, run_id: str) -> RunRecord:
        return RunRecord(
            run_id=RUN, state=RunState.OPEN, digest="", group_size=2, created_at=0.0, taker=self.taker,
            groups_per_step=2, env={"trainer": {"training_steps": self.training_steps}},
        )  # fmt: skip

    def take(self, *arguments: Any) -> tuple[int, RunRecord]:
        self.takes += 1
        self._at("take", self.takes, self)
        incarnation, record = super().take(*arguments)
        return incarnation, record.model_copy(update={"env": self.get_run(RUN).env})

    def lease(self, run_id: str, incarnation: int, batch_id: str, *more: Any, **named: Any) -> Any:
        self._at("lease", PolicyVersion.parse(batch_id).step, self)
        return super().lease(run_id, incarnation, batch_id, *more, **named)

    def ack(self, *arguments: Any, **named: Any) -> None:
        self._at("ack", 0, self)
        super().ack(*arguments)
        self.state.write_text(" ".join([*self.acked_before, *self.acked]))

    def report_metrics(self, run_id: str, source: str, step: int, values: Any, **named: Any) -> None:
        self._at("report", step, self)
        super().report_metrics(run_id, source, step, values)

    def record_version(self, run_id: str, version: PolicyVersion, **named: Any) -> None:
        super().record_version(run_id, version)
        self._at("served", version.step, self)

    @property
    def peer(self) -> int:
        return int((self.folder / "rank1.pid").read_text())


def _stop(event: str, step: int, run: Run) -> None:
    signal.raise_signal(signal.SIGTERM)


def _stop_before_a_run(event: str, step: int, run: Run) -> None:
    run.is_open = False
    signal.raise_signal(signal.SIGTERM)


def _refuse(code: str) -> Callable[[str, int, Run], None]:
    def refuse(event: str, step: int, run: Run) -> None:
        run.taker = "another" if code == "fenced" else ""
        run.error = ApiError(code, 409, "refused")

    return refuse


def _extend(event: str, step: int, run: Run) -> None:
    run.training_steps = 4


def _suspend_and_extend(event: str, step: int, run: Run) -> None:
    run.training_steps = 4
    raise ApiError("suspended", 409, "another run took the stack, and gave it back")


def _fill_disk(size: int) -> Callable[[str, int, Run], None]:
    """No file of rank 0 may be larger than `size` bytes from now on."""

    def fill(event: str, step: int, run: Run) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    return fill


def _write_newer_checkpoint(event: str, step: int, run: Run) -> None:
    folder = run.folder / "runs" / RUN / "checkpoints" / f"step-{step:06d}"
    folder.mkdir()
    (folder / STATE).write_bytes(msgspec.json.encode(progress(step, incarnation=9)))


def _kill_rank_1(event: str, step: int, run: Run) -> None:
    os.kill(run.peer, signal.SIGKILL)


def _die(event: str, step: int, run: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """At `event` of `step`, rank 0 does `act`."""

    event: str
    step: int
    act: Callable[[str, int, Run], None]
    flags: dict[str, str] = dataclasses.field(default_factory=dict)
    grace: int = 20
    """Seconds from a stop request to the end."""
    spoilt: tuple[int, ...] = ()
    """Steps of whose groups nothing is left to train on."""
    room: int | None = None
    """Tokens of a micro-batch that fit in the memory of rank 1."""
    long: tuple[int, ...] = ()
    """Steps whose first group has a sequence of LONG tokens."""


SCENARIOS = {
    "stopped": Scenario("served", 2, _stop),
    "stopped before a run": Scenario("open", 0, _stop_before_a_run),
    "abandoned": Scenario("lease", 3, _stop, grace=0),
    "too many skipped": Scenario("", 0, _stop, {"max_skipped_steps": "0"}, spoilt=(2,)),
    "fenced lease": Scenario("lease", 3, _refuse("fenced")),
    "fenced ack": Scenario("ack", 0, _refuse("fenced"), {"checkpoint_interval": "2"}),
    "fenced checkpoint": Scenario("report", 2, _write_newer_checkpoint, {"checkpoint_interval": "2"}),
    "suspended": Scenario("lease", 3, _refuse("suspended")),
    "extended before the take": Scenario("take", 1, _extend, {"training_steps": ""}),
    "suspended before the take": Scenario("take", 1, _suspend_and_extend, {"training_steps": ""}),
    "error": Scenario("lease", 3, _refuse("run_missing")),
    "full disk, model": Scenario("report", 2, _fill_disk(30_000), {"checkpoint_interval": "2"}),
    "full disk, optimizer": Scenario("report", 2, _fill_disk(120_000), {"checkpoint_interval": "2"}),
    "full disk, export": Scenario("served", 4, _fill_disk(30_000)),
    "rank 0 killed": Scenario("lease", 3, _die),
    "rank 1 killed": Scenario("lease", 3, _kill_rank_1),
    "rank 1 out of memory": Scenario("", 0, _stop, {"batch_size": "2"}, room=10),
}
ONE_BY_ONE = {
    # The micro-batch of step 1 has 16 tokens. One sequence of step 2 does not fit alone.
    "continued": Scenario("", 0, _stop, {"batch_size": "2", "checkpoint_interval": "1"}, room=10, long=(2,)),
}
"""Scenarios that torchrun starts again."""


@contextmanager
def small_memory(room: int) -> Iterator[None]:
    """Lets micro-batches of more than `room` tokens run out of memory in the forward pass."""
    forward = Scorer.forward

    def scored(scorer: Scorer, micro: MicroBatch, **options: Any) -> Any:
        if torch.is_grad_enabled() and micro.layout.tokens.numel() > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(scorer, micro, **options)

    with mock.patch.object(Scorer, "forward", scored):
        yield


def _spoil(group: TrajectoryGroup) -> TrajectoryGroup:
    return dataclasses.replace(group, tokens=group.tokens + np.int32(10**6))


def _lengthen(group: TrajectoryGroup) -> TrajectoryGroup:
    return make_group(group.group_id, lengths=[(3, LONG - 3), (3, 6)])


def _step(group: TrajectoryGroup) -> int:
    return int(group.group_id[1:]) // 2


def _run(scenario: Scenario, folder: Path, model: str) -> int:
    def at(event: str, step: int, run: Run) -> None:
        if (event, step) == (scenario.event, scenario.step):
            scenario.act(event, step, run)

    api = Run(folder, at)
    api.ready = [
        _spoil(group)
        if _step(group) in scenario.spoilt
        else _lengthen(group)
        if _step(group) in scenario.long
        else group
        for group in api.ready
    ]
    flags = _FLAGS | {"model_name": model} | scenario.flags
    sys.argv = ["trainer", *(part for name, value in flags.items() if value for part in (f"--{name}", value))]
    served = {"id": model, "max_model_len": 512}
    try:
        with (
            mock.patch("gristmill_trainer.startup.SyncClient", return_value=api),
            mock.patch("gristmill_trainer.startup.ServerList.served", return_value=served),
            small_memory(scenario.room) if scenario.room and os.environ["RANK"] == "1" else nullcontext(),
        ):
            return trainer.main()
    finally:
        if os.environ["RANK"] == "0":
            (folder / "api.json").write_text(json.dumps({"acked": len(api.acked), "leased": len(api.leased)}))


def _fork(scenario: Scenario, folder: Path, model: str, rank: int, port: str) -> str:
    """Runs a scenario in a forked process. Returns its exit code, or "hangs"."""
    child = os.fork()
    if child == 0:
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
        os.environ |= {
            "MASTER_PORT": port,
            "GRISTMILL_RUNS_DIR": str(folder / "runs"),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(10 + scenario.grace),
        }
        code = 99
        try:
            code = _run(scenario, folder, model)
        except BaseException:  # noqa: BLE001  The parent reads the traceback in the log.
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def main(rank: int, folder: Path, model: str, ports: list[str]) -> None:
    for (name, scenario), port in zip(SCENARIOS.items(), ports, strict=True):
        (folder / name).mkdir(exist_ok=True)
        code = _fork(scenario, folder / name, model, rank, port)
        (folder / name / f"rank{rank}.code").write_text(code)


if __name__ == "__main__":
    if sys.argv[3] in ONE_BY_ONE:
        os.environ["GRISTMILL_RUNS_DIR"] = str(Path(sys.argv[1]) / "runs")
        sys.exit(_run(ONE_BY_ONE[sys.argv[3]], Path(sys.argv[1]), sys.argv[2]))
    main(int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","))
