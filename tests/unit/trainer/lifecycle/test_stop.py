"""A request to stop has a deadline."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import threading
import time
from pathlib import Path

import pytest
import yaml
from tests.support.errors import raises

from gristmill import ApiUnreachable
from gristmill.internal.signals import stop_on_hangup
from gristmill_trainer.settings import TrainerSettings
from gristmill_trainer.stop import StoppedError, StopRequest, leave_to_rank_0, torchrun_grace


def test_stop_abandons_work_that_would_end_after_the_deadline() -> None:
    stop = StopRequest(grace=100.0)
    assert not stop.should_abandon(1e9), "nobody asked"
    stop.raise_if_requested()
    signal.raise_signal(signal.SIGTERM)
    assert stop.requested
    assert not stop.should_abandon(10.0)
    assert stop.should_abandon(101.0)
    with pytest.raises(StoppedError):
        stop.raise_if_requested()


def test_stop_is_requested_by_a_closed_terminal() -> None:
    stop = StopRequest(grace=100.0)
    stop_on_hangup()
    signal.raise_signal(signal.SIGHUP)
    assert stop.requested


def test_stop_grace_period_ends_before_compose_kills() -> None:
    compose = yaml.safe_load((Path(__file__).parents[4] / "compose.yaml").read_text())
    assert (
        float(compose["services"]["trainer"]["stop_grace_period"].removesuffix("s"))
        >= TrainerSettings().stop_grace_seconds + 5
    )


def test_stop_grace_period_may_change_during_a_run() -> None:
    """The grace period belongs to the machine, and a run may move to another machine."""
    assert "stop_grace_seconds" not in TrainerSettings(stop_grace_seconds=20).record()


def test_stop_request_ends_the_wait_for_an_unreachable_service() -> None:
    stop = StopRequest(grace=100.0)
    with pytest.raises(ApiUnreachable), stop.stop_on_timeout():
        raise ApiUnreachable("api_unreachable", "away")
    assert stop.patience() == 600.0
    signal.raise_signal(signal.SIGTERM)
    assert 0 < stop.patience() <= 10.0
    with raises(StoppedError, "stopped", problem="api_unreachable") as raised, stop.stop_on_timeout():
        raise ApiUnreachable("api_unreachable", "away")
    assert str(raised.value).endswith(" away")
    stop.grace = 0.0
    assert stop.patience() == 0.0


def test_stop_grace_period_under_torchrun_is_torchruns() -> None:
    assert torchrun_grace({}) == 20.0
    assert torchrun_grace({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}) == 110.0
    assert torchrun_grace({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}) == 0.0


def test_stop_under_torchrun_counts_a_repeated_signal_once() -> None:
    stop = StopRequest(20.0, torchrun=True)
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    assert stop.requested
    StopRequest(20.0)
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "without torchrun the second ends the process"


def test_stop_is_handled_by_rank_0_only() -> None:
    leave_to_rank_0()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)


def test_stop_grace_period_starts_at_the_signal(tmp_path: Path) -> None:
    """The main thread may be in a long backward pass then, and receives the request afterwards."""
    stop = StopRequest(100.0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    noted: list[float | None] = []

    def end_the_pass() -> None:
        until = time.monotonic() + 60
        while stop.asked_at is None and time.monotonic() < until:
            time.sleep(0.01)
        noted.append(stop.asked_at)
        pipe.write_text("end\n")

    thread = threading.Thread(target=end_the_pass, daemon=True)
    thread.start()
    # One call without bytecode, in which the signal arrives and which ends only after the thread has seen the request.
    assert os.system(f"kill -TERM {os.getpid()}; read line < {shlex.quote(str(pipe))}") == 0
    thread.join()
    assert noted != [None]
    assert stop.asked_at == noted[0]


@pytest.mark.parametrize(
    ("first", "second"), [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)], ids=["term", "int"]
)
def test_stop_second_signal_of_either_kind_ends_the_process(first: signal.Signals, second: signal.Signals) -> None:
    StopRequest(100.0)
    signal.raise_signal(first)
    assert signal.getsignal(second) is signal.SIG_DFL


def test_stop_is_not_requested_by_a_signal_to_a_fork() -> None:
    """As with a hook that evaluates in separate processes."""
    stop = StopRequest(100.0)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(30)
    assert child.exitcode == -signal.SIGTERM
    assert not stop.requested
    signal.raise_signal(signal.SIGTERM)
    assert stop.requested
