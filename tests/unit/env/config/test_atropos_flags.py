"""Atropos' spellings of flags: these are its sections. test_run_settings tests the flags of the step-by-step guide."""

from __future__ import annotations

from tests.support.errors import raises

from gristmill import ConfigError
from gristmill_env.run_settings import RunSettings

BY_SECTION = (
    "--env.group_size 4 --env.use_wandb --env.max_num_workers=-1 --no-env.ensure_scores_are_not_same "
    "--dataset.split test[:10] --openai.base_url http://h:1/v1 --openai.model_name=m --server_configs.timeout 5 "
    "--slurm false --testing"
)


def test_flags_may_name_their_section() -> None:
    config = RunSettings.read(BY_SECTION.split(), {}, "test").config
    assert (config.group_size, config.use_wandb, config.max_num_workers) == (4, True, -1)
    assert not config.ensure_scores_are_not_same
    assert config.dataset.split == "test[:10]"
    assert (config.server.base_url, config.server.model_name, config.server.timeout) == ("http://h:1/v1", "m", 5)
    assert (config.slurm, config.testing) == (False, True)


def test_mistyped_atropos_flag_is_an_error() -> None:
    with raises(ConfigError, "unknown_flag", name="--gruop_size") as raised:
        RunSettings.read(["--env.gruop_size", "4"], {}, "test")
    assert "'group_size'" in str(raised.value)
    with raises(ConfigError, "unknown_flag", name="--trainer.group_size"):
        RunSettings.read(["--trainer.group_size", "4"], {}, "test")
