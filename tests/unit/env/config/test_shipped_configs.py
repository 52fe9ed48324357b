"""Every file in configs/ loads, names existing rewards, and fills whole groups into every step."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gristmill_env.atropos import translate
from gristmill_env.rewards import create_reward
from gristmill_env.run_settings import RunSettings
from gristmill_env.settings import DatasetConfig
from gristmill_trainer.settings import TrainerSettings

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
RUNS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "trainer")


def test_what_ships() -> None:
    wanted = {"quickstart", "gsm8k", "gsm8k_debug", "dataset_local", "math", "multiple_choice", "qwen_length"}
    assert wanted <= set(RUNS)


@pytest.fixture(params=RUNS)
def launch(request: pytest.FixtureRequest) -> RunSettings:
    return RunSettings.read(["--config", request.param], {"GRISTMILL_CONFIG_DIR": str(CONFIGS)}, "test")


def test_it_is_one_of_ours(launch: RunSettings) -> None:
    assert launch.config_path is not None
    assert translate(yaml.safe_load(launch.config_path.read_text()), "file").notes == []


def test_its_rewards_can_be_made(launch: RunSettings) -> None:
    specs = launch.config.dataset.rewards()
    assert specs
    for spec in specs:
        create_reward(spec.type, spec.params)


def test_a_step_is_made_of_whole_groups(launch: RunSettings) -> None:
    block = launch.config.trainer_block()
    settings = TrainerSettings.model_validate(block)
    assert not block or settings.sequences_per_step % launch.config.group_size == 0


def test_it_says_where_rows_come_from_and_what_a_prompt_is(launch: RunSettings) -> None:
    dataset = launch.config.dataset
    if dataset.dataset_path is not None:
        assert (CONFIGS / dataset.dataset_path).exists()
    else:
        assert dataset.dataset_name
    assert dataset.prompt_template is not None or "prompt_field" in dataset.model_fields_set
    assert dataset.gold_field
    assert dataset.max_tokens < launch.config.max_token_length


def test_all_local_rows_have_the_columns() -> None:
    from gristmill_env.data.dataset import PromptDataset

    for name in ("quickstart", "dataset_local"):
        config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        item = PromptDataset(DatasetConfig.model_validate(config["dataset"]), CONFIGS).item(0)
        assert item.prompt.startswith("What is")
        assert item.answer is not None
        assert "####" in item.answer
