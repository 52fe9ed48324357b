"""The line that reports a run's speed."""

from __future__ import annotations

import logging

import pytest

from gristmill_env.progress import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_pace_logs_rates_and_the_remaining_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    pace = Pace("sums", clock)
    for second in range(1, 21):
        clock.now = 100.0 + second
        pace.group(tokens=50, step=10 + second // 4, steps=60)
    assert _lines(caplog) == [
        "progress run=sums step=12/60 groups=10 groups_per_second=1.000 tokens_per_second=50 left='4 min'",
        "progress run=sums step=15/60 groups=20 groups_per_second=1.000 tokens_per_second=50 left='3 min'",
    ]


def test_pace_logs_no_remaining_time_if_it_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    """Before the first step is done, and if the number of steps is unknown."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    pace = Pace("sums", clock)
    for second, steps in ((11, 60), (22, None)):
        clock.now = 100.0 + second
        pace.group(tokens=5, step=3, steps=steps)
    assert [text.split(" groups=")[0] for text in _lines(caplog)] == [
        "progress run=sums step=3/60",
        "progress run=sums step=3",
    ]
    assert not any("left" in text for text in _lines(caplog))
