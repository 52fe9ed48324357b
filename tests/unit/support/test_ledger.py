"""The bookkeeping detects each kind of violation."""

from __future__ import annotations

from typing import Any

from tests.support.ledger import Ledger

from gristmill import GroupAudit

SOUND: dict[str, Any] = {
    "trained": ["a", "b"],
    "ready": ["c"],
    "leased": ["d"],
    "dead": [],
    "dropped": {"e": "stale"},
    "outstanding": [],
}


def ledger(acknowledged: str = "abcde", lineage: str = "ab", **audit: Any) -> Ledger:
    return Ledger.of(acknowledged, list(lineage), GroupAudit.model_validate({**SOUND, **audit}))


def test_ledger_with_every_group_in_one_place_has_no_problem() -> None:
    sound = ledger()
    assert sound.problems() == {}
    assert sound.counts() == {
        "acknowledged": 5,
        "trained": 2,
        "ready": 1,
        "leased": 1,
        "dead": 0,
        "dropped": 1,
        "lost": 0,
        "trained_twice": 0,
        "in_two_places": 0,
    }


def test_ledger_finds_an_acknowledged_group_that_is_nowhere() -> None:
    assert ledger(ready=[]).problems() == {"lost": ["c"]}


def test_ledger_accepts_a_stored_group_whose_answer_was_lost() -> None:
    assert ledger(acknowledged="abde").problems() == {}


def test_ledger_finds_a_trained_group_that_no_checkpoint_has() -> None:
    assert ledger(lineage="a").problems() == {"lost": ["b"]}
    assert ledger(acknowledged="acde", lineage="a").problems() == {"lost": ["b"]}


def test_ledger_accepts_a_trimmed_tombstone_of_a_trained_group() -> None:
    assert ledger(trained=[]).problems() == {}


def test_ledger_finds_a_group_that_was_trained_twice() -> None:
    assert ledger(lineage="aba").problems() == {"trained twice": ["a"]}


def test_ledger_finds_a_trained_group_that_is_still_queued_or_leased() -> None:
    assert ledger(ready=["c", "a"]).problems() == {"in two places": ["a"]}
    assert ledger(leased=["d", "b"]).problems() == {"in two places": ["b"]}
    assert ledger(leased=["d", "c"]).problems() == {"in two places": ["c"]}


def test_ledger_finds_a_dead_group() -> None:
    assert ledger(ready=[], dead=["c"]).problems() == {"dead": ["c"]}
