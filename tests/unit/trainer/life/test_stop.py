"""A request to stop has a deadline."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gristmill_trainer.stop import GRACE, StoppedError, StopRequest, leave_to_rank_0, torchrun_grace


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_what_would_end_after_the_deadline_is_abandoned() -> None:
    stop = StopRequest(grace=100.0)
    assert not stop.should_abandon(1e9), "nobody asked"
    stop.raise_if_requested()
    signal.raise_signal(signal.SIGTERM)
    assert stop.requested
    assert not stop.should_abandon(10.0)
    assert stop.should_abandon(101.0)
    with pytest.raises(StoppedError):
        stop.raise_if_requested()


def test_the_grace_ends_before_compose_kills() -> None:
    compose = yaml.safe_load((Path(__file__).parents[4] / "compose.yaml").read_text())
    assert float(compose["services"]["trainer"]["stop_grace_period"].removesuffix("s")) >= GRACE + 5


def test_under_torchrun_the_grace_is_torchruns() -> None:
    assert torchrun_grace({}) == 20.0
    assert torchrun_grace({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}) == 110.0
    assert torchrun_grace({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}) == 0.0


def test_a_signal_that_torchrun_sends_on_is_no_second_request() -> None:
    stop = StopRequest(torchrun=True)
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    assert stop.requested
    StopRequest()
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "without torchrun the second ends the process"


def test_the_other_ranks_leave_a_stop_to_rank_0() -> None:
    leave_to_rank_0()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)
