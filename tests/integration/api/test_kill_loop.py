"""SIGKILL of every process, at random: every group is trained once, or queued, or leased. No group is lost.

`KILL_LOOP_SEED=7 pytest ...` repeats a run's schedule of kills. A failure prints its seed.
"""

from __future__ import annotations

import os
import random

import pytest
from tests.support.kill_loop import EVERYONE, KillLoop, Outcome

SHORT, LONG = 5, 60
"""Rounds of kills: the first takes a quarter of a minute and the second minutes, on an idle machine."""


def seed() -> int:
    given = os.environ.get("KILL_LOOP_SEED")
    return int(given) if given else random.SystemRandom().randrange(1 << 32)


def loop(rounds: int) -> Outcome:
    with KillLoop(rounds=rounds, seed=seed()) as kills:
        outcome = kills.run()
    print(outcome.text())  # noqa: T201  pytest shows it where a test fails, and with -rP
    return outcome


def check(outcome: Outcome) -> None:
    assert outcome.ledger.problems() == {}, outcome.text()
    assert outcome.ended_by_themselves == [], outcome.text()


def test_kills_for_a_short_time_lose_and_repeat_no_group() -> None:
    check(loop(SHORT))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_kills_for_minutes_lose_and_repeat_no_group() -> None:
    outcome = loop(LONG)
    check(outcome)
    assert set(outcome.kills) == set(EVERYONE)
