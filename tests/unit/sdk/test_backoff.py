"""The pauses between the repetitions of a call."""

from __future__ import annotations

import random

import pytest

from gristmill.internal.backoff import Backoff, asked_pause


def test_backoff_grows_to_its_limit_with_jitter() -> None:
    backoff = Backoff(1.0, 8.0)
    for middle in (1, 2, 4, 8, 8, 8):
        assert 0.5 * middle <= backoff.next() <= 1.5 * middle
    assert len({backoff.next() for _ in range(8)}) == 8
    backoff.reset()
    assert backoff.next() <= 1.5


def test_backoff_does_not_advance_the_generator_of_the_process() -> None:
    state = random.getstate()
    Backoff(1.0, 8.0).next()
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("2", 2.0), ("0.5", 0.5), ("9999", 120.0), ("inf", 120.0), ("-1", 0.0), ("nan", 0.0), ("", 0.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0),
    ],
)  # fmt: skip
def test_pause_that_a_server_asks_for_is_bounded(header: str, seconds: float) -> None:
    assert asked_pause({"Retry-After": header}) == seconds
    assert asked_pause({}) == 0.0
