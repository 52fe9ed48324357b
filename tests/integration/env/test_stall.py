"""An environment whose event loop is blocked ends with the stack of the blocking code, and the next environment
continues."""

from __future__ import annotations

import signal
import time

import pytest
from tests.integration.env.conftest import Environments, HandTrainer

from gristmill.internal.stall import EXIT_CODE
from gristmill_cli.local.processes import Service

_HANGING = """
import ctypes, sys, threading, time
from gristmill.internal.stall import StallLimits
from gristmill_env import serve
from gristmill_env.cli import main
serve.STALL = StallLimits(floor={floor}, frozen={frozen})
build, done = serve.build_group, []
def hang(*arguments, **named):
    done.append(1)
    if len(done) == 2:
        print("blocked", flush=True)
        {hang}
    return build(*arguments, **named)
serve.build_group = hang
sys.exit(main())
"""
IN_PYTHON = "threading.Event().wait()"
WITH_THE_INTERPRETERS_LOCK = "ctypes.PyDLL(None).pause()"


def start(environments: Environments, trainer: HandTrainer, hang: str, floor: float, frozen: float) -> Service:
    program = _HANGING.format(hang=hang, floor=floor, frozen=frozen)
    return environments.program(trainer.url, ["-c", program], name="hanging")


@pytest.mark.long
@pytest.mark.parametrize(
    ("hang", "floor", "frozen", "exit_code"),
    [(IN_PYTHON, 10, 900, EXIT_CODE), (WITH_THE_INTERPRETERS_LOCK, 900, 10, 1)],
)
def test_environment_with_a_blocked_loop_ends_and_the_next_one_continues_the_run(
    environments: Environments, trainer: HandTrainer, hang: str, floor: float, frozen: float, exit_code: int
) -> None:
    blocked = start(environments, trainer, hang, floor, frozen)
    trainer.take()
    assert environments.ends(blocked, timeout=120) == exit_code
    assert "in hang" in environments.output.of("hanging")
    again = environments.process(trainer.url, name="again")
    trainer.train(until=2)
    trainer.api.finish("sums", trainer.incarnation)
    assert environments.ends(again) == 0
    assert trainer.api.status("sums").trained == 4


@pytest.mark.long
def test_environment_stopped_for_long_does_not_count_as_blocked(
    environments: Environments, trainer: HandTrainer
) -> None:
    env = start(environments, trainer, "time.sleep(4)", 20, 900)
    trainer.take()
    environments.stack.wait_until(env, lambda: "hanging | blocked" in environments.output.lines, timeout=120)
    env.process.send_signal(signal.SIGSTOP)
    time.sleep(30)
    env.process.send_signal(signal.SIGCONT)
    trainer.train(until=2)
    trainer.api.finish("sums", trainer.incarnation)
    assert environments.ends(env) == 0
