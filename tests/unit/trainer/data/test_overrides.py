"""Overrides by an Atropos environment, from its JSON through the API's translation to the samples."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
from tests.unit.trainer.data.bad import group_with, limits

from gristmill import TrajectoryGroup
from gristmill.hyperparameters import Hyperparameters
from gristmill_api.atropos.parse import read_one
from gristmill_trainer.data.advantages import read_overrides
from gristmill_trainer.data.samples import Prepared, to_samples


def scored(**changed: Any) -> dict[str, Any]:
    """Four sequences as a stock environment posts them."""
    none = dict.fromkeys(("advantages", "ref_logprobs", "messages", "images", "distill_token_ids", "distill_logprobs"))
    return {
        **none,
        "tokens": [[1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 6]],
        "masks": [[-100, 2, 3], [-100, 2, 4], [-100, 2, 5], [-100, 2, 6]],
        "scores": [1.0, -1.0, 1.0, -1.0],
        "inference_logprobs": [[1.0, -0.5, -0.25]] * 4,
        "generation_params": {"temperature": 0.5},
        "overrides": [{"set_advantage_to_zero": False}, {"set_advantage_to_zero": True}, {}, {}],
        "group_overrides": None,
        "env_id": 0,
    } | changed


def prepare(**changed: Any) -> Prepared:
    stored = read_one(json.dumps(scored(**changed)).encode()).stored("run", "1.5")
    return to_samples([TrajectoryGroup.decode(stored.body)], limits(), Hyperparameters())


def test_override_that_zeroes_a_sequence_keeps_it_in_the_groups_baseline() -> None:
    prepared = prepare()
    one = 1 / (np.sqrt(4 / 3) + 1e-4)
    found = np.stack([sample.advantages for sample in prepared.samples])
    np.testing.assert_allclose(found, np.repeat([[one], [0], [one], [-one]], 3, axis=1), rtol=1e-6)
    assert [sample.trained_tokens for sample in prepared.samples] == [2, 2, 2, 2]
    assert prepared.statistics.zeroed == 1
    assert prepared.statistics.zero_advantage_share == 0


def test_override_of_a_group_zeroes_all_its_advantages() -> None:
    prepared = prepare(overrides=None, group_overrides={"set_advantage_to_zero": True, "group_size": 4})
    assert not any(sample.advantages.any() for sample in prepared.samples)
    assert prepared.statistics.zeroed == 4
    assert prepared.statistics.zero_advantage_share == 1
    assert prepared.statistics.unknown_overrides == {}


def test_override_zeroes_sent_advantages_too() -> None:
    prepared = prepare(advantages=[[0.5, 1.5, 2.5]] * 4)
    found = np.stack([sample.advantages for sample in prepared.samples])
    np.testing.assert_array_equal(found, [[0.5, 1.5, 2.5], [0, 0, 0], [0.5, 1.5, 2.5], [0.5, 1.5, 2.5]])


def test_overrides_stay_with_their_sequences_when_the_api_omits_one() -> None:
    masks = [[-100, -100, -100], *scored()["masks"][1:]]
    prepared = prepare(masks=masks)
    assert [bool(sample.advantages.any()) for sample in prepared.samples] == [False, True, True]


def test_empty_overrides_of_fewer_sequences_are_accepted() -> None:
    prepared = prepare(overrides=[{}, {"set_advantage_to_zero": False}])
    assert len(prepared.samples) == 4
    assert not prepared.rejected


def test_unknown_override_keys_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    overrides = [{"colour": "red"}, {"colour": "blue"}, {}, {}]
    with caplog.at_level(logging.WARNING):
        first = prepare(overrides=overrides, group_overrides={"shape": 1})
        prepare(overrides=overrides)
    assert first.statistics.unknown_overrides == {"colour": 2, "shape": 1}
    assert len(first.samples) == 4
    assert sum("colour" in record.message for record in caplog.records) == 1


def test_group_without_overrides_has_no_zeroed_sequences() -> None:
    nothing: list[Any] = [None, {}, {"sequences": None, "group": None}, {"sequences": [None, {}]}]
    for overrides in nothing:
        found = read_overrides(group_with(overrides=overrides))
        assert not found.zeroed.any()
        assert not found.unknown
