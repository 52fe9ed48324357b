"""Settings of the trainer at the top level, under Atropos' names."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill.internal.settings import parse
from gristmill_env.settings.run import EnvConfig


@pytest.mark.parametrize(
    ("values", "block"),
    [
        ({}, {}),
        ({"trainer": {"batch_size": 4}}, {"batch_size": 4}),
        ({"batch_size": 64}, {"batch_size": 64, "gradient_accumulation_steps": 1}),
        (
            {"batch_size": 64, "trainer": {"gradient_accumulation_steps": 8}},
            {"batch_size": 8, "gradient_accumulation_steps": 8},
        ),
        (
            {"batch_size": 64, "trainer": {"gradient_accumulation_steps": 8, "batch_size": 8}},
            {"batch_size": 8, "gradient_accumulation_steps": 8},
        ),
        ({"total_steps": 3, "max_batches_offpolicy": 0}, {"training_steps": 3, "max_staleness": 0}),
        ({"total_steps": 3, "trainer": {"training_steps": 3}}, {"training_steps": 3}),
    ],
)
def test_trainer_block_contains_the_trainers_settings(values: dict[str, Any], block: dict[str, Any]) -> None:
    config = EnvConfig.model_validate(values)
    assert config.recorded("tiny")["trainer"] == block


@pytest.mark.parametrize(
    ("values", "key", "code", "quoted"),
    [
        (
            {"total_steps": 3, "trainer": {"training_steps": 4}},
            "settings",
            "values_contradict",
            ["total_steps is 3", "trainer.training_steps is 4"],
        ),
        (
            {"max_batches_offpolicy": 1, "trainer": {"max_staleness": 0}},
            "settings",
            "values_contradict",
            ["max_batches_offpolicy is 1", "trainer.max_staleness is 0"],
        ),
        (
            {"batch_size": 64, "trainer": {"batch_size": 8}},
            "settings",
            "values_contradict",
            ["batch_size is 64", "8 x 1"],
        ),
        (
            {"batch_size": 10, "trainer": {"gradient_accumulation_steps": 4}},
            "settings",
            "batch_not_divisible",
            ["batch_size is 10", "trainer.gradient_accumulation_steps = 4"],
        ),
        (
            {"batch_size": 10, "trainer": {"gradient_accumulation_steps": "x"}},
            "settings",
            "not_a_positive_integer",
            ["trainer.gradient_accumulation_steps is 'x'"],
        ),
        ({"max_num_workers": 0}, "max_num_workers", "no_workers", []),
        ({"max_num_workers": -2}, "max_num_workers", "greater_than_equal", []),
    ],
)
def test_contradicting_trainer_settings_are_errors(
    values: dict[str, Any], key: str, code: str, quoted: list[str]
) -> None:
    with raises(ConfigError, "invalid_settings", problems={key: code}) as raised:
        parse(EnvConfig, values, "file")
    assert [part for part in quoted if part not in str(raised.value)] == []


def test_max_num_workers_per_node_sets_the_workers_if_the_total_is_unset() -> None:
    assert EnvConfig(max_num_workers=3).workers == 3
    assert EnvConfig(max_num_workers=-1, max_num_workers_per_node=5).workers == 5
