"""A request to stop has a deadline."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gristmill_trainer.stop import GRACE, StoppedError, StopRequest


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
