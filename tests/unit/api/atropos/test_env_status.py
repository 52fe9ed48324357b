"""The values of /status-env, computed by hand. test_conversation.py compares them with atroposlib's server."""

from __future__ import annotations

import dataclasses

from gristmill_api.atropos.env_status import EnvFacts, EnvView, status
from gristmill_api.atropos.queue import MOST_ENVS

ALONE = EnvView(
    number=0,
    step=3,
    batch_size=16,
    group_size=4,
    own=EnvFacts(512, 1.0),
    connected=[EnvFacts(512, 1.0)],
    shares={},
    ready=[],
)


def test_status_of_a_single_environment_with_an_empty_queue() -> None:
    assert status(ALONE) == {
        "current_step": 3,
        "queue_size": 0,
        "unallocated_fraction": 1.0,
        "self_queue_size": 0,
        "max_group_size": 1,
        "env_weight": 1.0,
    }


def test_status_weight_follows_context_and_weight_with_a_minimum() -> None:
    two = dataclasses.replace(ALONE, connected=[EnvFacts(512, 1.0), EnvFacts(1024, 1.5), EnvFacts(512, -3.0)])
    assert status(two)["env_weight"] == 512 / (512 + 1536)
    assert status(dataclasses.replace(two, own=EnvFacts(512, -3.0)))["env_weight"] == 0.01
    assert status(dataclasses.replace(two, connected=[]))["env_weight"] == 0.01


def test_status_is_finite_for_the_largest_registrations() -> None:
    largest = EnvFacts(2**53, 1e6)
    most = dataclasses.replace(
        ALONE, batch_size=2**16, own=largest, connected=[largest] * MOST_ENVS, shares={"1": 1e6}, ready=[("1", 1, 9)]
    )
    assert status(most)["env_weight"] == 0.01
    assert status(most)["queue_size"] == 0


def test_status_counts_groups_of_others_in_packs_without_their_shares() -> None:
    others = dataclasses.replace(
        ALONE, ready=[("0", 4, 2), ("1", 8, 1), ("1", 2, 1), ("", 4, 1), ("2", 8, 1)], shares={"1": 0.25, "0": 0.5}
    )
    # own 8; env 1: 10 in packs of 8 are 16, less int(16 * 0.25); no environment: 8; env 2: 8
    assert status(others)["queue_size"] == (8 + 12 + 8 + 8) // 4
    assert status(others)["self_queue_size"] == 2
    assert status(others)["max_group_size"] == 8
    assert status(others)["unallocated_fraction"] == 0.25


def test_status_does_not_count_single_sequences_of_others() -> None:
    assert status(dataclasses.replace(ALONE, group_size=1, ready=[("0", 1, 3), ("1", 1, 9)]))["queue_size"] == 3


def test_status_with_group_size_zero_does_not_divide_by_zero() -> None:
    assert status(dataclasses.replace(ALONE, group_size=0, ready=[("0", 2, 3)]))["queue_size"] == 6


def test_status_of_a_finished_run_reports_a_full_queue() -> None:
    assert status(dataclasses.replace(ALONE, finished=True))["queue_size"] > 1_000_000
