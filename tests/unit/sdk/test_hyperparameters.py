"""The `trainer:` block of a run: hyperparameters and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.errors import raises

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
    with raises(ConfigError, "trainer_only_key", keys=[key]):
        check({"learning_rate": 1e-6, key: None})


def test_block_with_an_unknown_key_names_the_nearest_one() -> None:
    with raises(UnknownKeyError, "unknown_key", where="here", problems={"learnig_rate": "unknown_key"}) as raised:
        check({"learnig_rate": 1e-6})
    assert "learning_rate" in str(raised.value)


@pytest.mark.parametrize("block", ["fast", ["on_step"], 3, None])
def test_block_that_is_not_a_mapping_is_refused(block: Any) -> None:
    with raises(ConfigError, "not_a_mapping"):
        check(block)


@pytest.mark.parametrize(
    ("block", "code", "values"),
    [
        ({"batch_size": 10, "gradient_accumulation_steps": 2}, "partial_groups", {"sequences": 20, "group_size": 8}),
        ({"seed": 2**64}, "invalid_settings", {"problems": {"seed": "less_than"}}),
        ({"batch_size": "many"}, "invalid_settings", {"problems": {"batch_size": "int_parsing"}}),
        *(
            (
                {"checkpoint_interval": wrong},
                "invalid_settings",
                {"problems": {"checkpoint_interval": "interval_invalid"}},
            )
            for wrong in (0, -1, True, 2.5, "0", "0s", "0.0min", "5 minutes", "5m", "1:30", "", None)
        ),
        ({"clip_epsilon": 1}, "invalid_settings", {"problems": {"settings": "clip_epsilon_too_large"}}),
        ({"token_budget": 8, "seq_len": 9}, "invalid_settings", {"problems": {"settings": "token_budget_too_small"}}),
    ],
)
def test_block_with_a_wrong_value_is_refused(block: dict[str, Any], code: str, values: dict[str, Any]) -> None:
    with raises(ConfigError, code, **values):
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


@pytest.mark.parametrize(
    ("written", "interval", "seconds"),
    [
        (5, 5, None),
        ("12", 12, None),
        ("90s", "90s", 90),
        ("10min", "10min", 600),
        ("1.5 h", "1.5 h", 5400),
    ],
)
def test_checkpoint_interval_is_a_number_of_steps_or_a_time(
    written: Any, interval: int | str, seconds: float | None
) -> None:
    found = Hyperparameters(checkpoint_interval=written)
    assert (found.checkpoint_interval, found.checkpoint_seconds) == (interval, seconds)
    assert Hyperparameters.model_validate(found.model_dump()) == found
