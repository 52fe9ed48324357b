"""A trainer whose loop hangs exits, wherever it hangs, and the next trainer trains its groups."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.groups import make_group
from tests.support.ports import free_port
from tests.support.stack import Output, Vllm, start_api, start_redis

from gristmill import SyncClient
from gristmill.internal.stall import EXIT_CODE
from gristmill_cli.local.processes import LocalStack, Service

STEPS, GROUPS = 2, 2
RUN = "stalls"
_HANGING = """
import ctypes, os, sys, threading
from gristmill.internal.stall import StallLimits
from gristmill_trainer import startup
from gristmill_trainer.__main__ import main
from gristmill_trainer.learner import Learner
startup.STALL = StallLimits(floor={floor}, frozen={frozen}, multiple=10)
step = Learner.step
def hang(self, samples, number, *rest):
    if number == 2:
        print("hanging", flush=True)
        {hang}
    return step(self, samples, number, *rest)
Learner.step = hang
sys.exit(main())
"""
IN_PYTHON = "threading.Event().wait()"
IN_C = "ctypes.CDLL(None).pause()"
IN_C_WITH_THE_INTERPRETERS_LOCK = "ctypes.PyDLL(None).pause()"


class Stack:
    """API and trainers of one run, which the test feeds."""

    def __init__(self, stack: LocalStack, output: Output, vllm: Vllm, folder: Path, api: SyncClient) -> None:
        self.stack, self.output, self.api = stack, output, api
        self._places = vllm.environ(api.url, folder / "runs")

    def start(self, name: str, program: list[str], *flags: str) -> Service:
        own = ["--training_steps", str(STEPS), "--batch_size", str(2 * GROUPS), "--publisher", "none"]
        return self.stack.start(
            name, [sys.executable, *program, *own, "--checkpoint_interval", "1", *flags], self._places
        )

    def submit_all(self) -> None:
        sent = 0
        while sent < STEPS * GROUPS:
            grant = self.api.permits(RUN, "test", GROUPS, 60.0)
            for permit in grant.permits:
                assert grant.version is not None
                self.api.submit(
                    make_group(permit.group_id, RUN, version=grant.version, seed=permit.row, env_id="test"), "test"
                )
                sent += 1


@contextmanager
def _run(vllm: Vllm, folder: Path) -> Iterator[Stack]:
    output = Output()
    with LocalStack(output.add) as stack:
        redis_port, api_port = free_port(), free_port()
        start_redis(stack, folder / "redis", redis_port)
        start_api(stack, redis_port, api_port)
        with SyncClient(f"http://127.0.0.1:{api_port}") as api:
            api.create_run(RUN, {"trainer": {}, "dataset": {"max_tokens": 64}}, group_size=2)
            yield Stack(stack, output, vllm, folder, api)


@pytest.mark.long
@pytest.mark.parametrize(
    ("hang", "exit_code"),
    [(IN_PYTHON, EXIT_CODE), (IN_C, EXIT_CODE), (IN_C_WITH_THE_INTERPRETERS_LOCK, 1)],
)
def test_a_trainer_that_hangs_ends_and_the_next_one_finishes(
    vllm: Vllm, tmp_path: Path, hang: str, exit_code: int
) -> None:
    frozen = hang is IN_C_WITH_THE_INTERPRETERS_LOCK
    program = _HANGING.format(hang=hang, floor=1800 if frozen else 15, frozen=15 if frozen else 7200)
    with _run(vllm, tmp_path) as run:
        hanging = run.start("hanging", ["-c", program])
        run.submit_all()
        run.stack.wait_until(hanging, lambda: hanging.exit_code is not None, timeout=180)
        assert hanging.exit_code == exit_code
        assert "in hang" in run.output.of("hanging"), "the log names the place of the hang"
        left = run.api.audit(RUN)
        assert len({*left.trained, *left.leased}) == STEPS * GROUPS, "no group is lost"
        second = run.start("second", ["-m", "gristmill_trainer"])
        run.stack.wait_until(second, lambda: second.exit_code is not None, timeout=180)
        assert second.exit_code == 0
        assert len(run.api.audit(RUN).trained) == STEPS * GROUPS
        if not frozen:  # A thread wrote the checkpoint of step 1 meanwhile, and it names the groups without an ack.
            assert "step 1 of 2" in run.output.of("second")


@pytest.mark.long
def test_trainer_stopped_for_long_does_not_count_as_hung(vllm: Vllm, tmp_path: Path) -> None:
    program = _HANGING.format(hang="import time; time.sleep(4)", floor=15, frozen=7200)
    with _run(vllm, tmp_path) as run:
        trainer = run.start("trainer", ["-c", program])
        run.submit_all()
        run.stack.wait_until(trainer, lambda: "hanging" in run.output.of("trainer"), timeout=120)
        trainer.process.send_signal(signal.SIGSTOP)
        time.sleep(25)
        trainer.process.send_signal(signal.SIGCONT)
        run.stack.wait_until(trainer, lambda: trainer.exit_code is not None, timeout=120)
        assert trainer.exit_code == 0, run.output.lines


@pytest.mark.long
def test_user_hook_may_take_longer_than_the_stall_limit(vllm: Vllm, tmp_path: Path) -> None:
    hook = tmp_path / "slow.py"
    hook.write_text("import time\ndef hook(event):\n    if event.metrics.step == 1:\n        time.sleep(35)\n")
    program = _HANGING.format(hang="pass", floor=15, frozen=7200)
    with _run(vllm, tmp_path) as run:
        trainer = run.start("trainer", ["-c", program], "--on_step", f"{hook}:hook")
        run.submit_all()
        run.stack.wait_until(trainer, lambda: trainer.exit_code is not None, timeout=180)
        assert trainer.exit_code == 0, run.output.lines
        assert "on_step" in run.output.of("trainer"), "it says what it waits for"
