"""The `trainer:` block of a run: hyperparameters and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill import ConfigError, Hyperparameters
from gristmill.errors import UnknownKeyError
from gristmill.hyperparameters import TRAINER_ONLY, check_run_block
from gristmill_trainer.settings import TrainerSettings


def check(block: Any, group_size: int = 8) -> None:
    check_run_block(block, group_size, "here")


def test_trainer_only_names_every_setting_that_is_not_a_hyperparameter() -> None:
    assert set(TrainerSettings.model_fields) - set(Hyperparameters.model_fields) == TRAINER_ONLY


@pytest.mark.parametrize("key", sorted(TRAINER_ONLY))
def test_block_with_a_trainer_only_setting_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"here: '{key}' .*trainer\.yaml"):
        check({"learning_rate": 1e-6, key: None})


def test_block_with_an_unknown_key_names_the_nearest_one() -> None:
    with pytest.raises(UnknownKeyError, match=r"here: unknown key 'learnig_rate'\. Did you mean 'learning_rate'"):
        check({"learnig_rate": 1e-6})


@pytest.mark.parametrize("block", ["fast", ["on_step"], 3, None])
def test_block_that_is_not_a_mapping_is_refused(block: Any) -> None:
    with pytest.raises(ConfigError, match=r"here: .*mapping"):
        check(block)


@pytest.mark.parametrize(
    "block",
    [
        {"batch_size": 10, "gradient_accumulation_steps": 2},
        {"batch_size": "many"},
        {"clip_epsilon": 1},
        {"token_budget": 8, "seq_len": 9},
    ],
)
def test_block_with_a_wrong_value_is_refused(block: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="here"):
        check(block)


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"batch_size": 10},  # trainer.yaml may complete it to whole groups
        {"batch_size": 10, "gradient_accumulation_steps": 4},
        {"objective": "gspo", "lora_rank": 4, "token_budget": 4096, "compile": True},
    ],
)
def test_block_of_hyperparameters_is_accepted(block: dict[str, Any]) -> None:
    check(block)


def test_record_holds_the_settings_that_must_not_change() -> None:
    record = TrainerSettings(on_step="a.py:f", push_to_hub="a/b", token_budget=64, publisher="none").record()
    assert {"on_step", "push_to_hub", "resume", "use_wandb", "token_budget", "packing", "compile"}.isdisjoint(record)
    assert record["publisher"] == "none"
    assert record["learning_rate"] == 1e-6
