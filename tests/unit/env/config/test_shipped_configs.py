"""Every file in configs/ loads, names existing rewards, and fills whole groups into every step."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gristmill_env.atropos import translate
from gristmill_env.rewards import create_reward
from gristmill_env.run_settings import RunSettings
from gristmill_env.settings.dataset import DatasetConfig
from gristmill_trainer.settings import TrainerSettings

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
RUNS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "trainer")


def test_configs_folder_has_the_shipped_configs() -> None:
    wanted = {"quickstart", "gsm8k", "gsm8k_debug", "dataset_local", "math", "multiple_choice", "qwen_length"}
    assert wanted <= set(RUNS)


@pytest.fixture(params=RUNS)
def launch(request: pytest.FixtureRequest) -> RunSettings:
    return RunSettings.read(["--config", request.param], {"GRISTMILL_CONFIG_DIR": str(CONFIGS)}, "test")


def test_shipped_config_is_in_the_form_of_gristmill(launch: RunSettings) -> None:
    assert launch.config_path is not None
    assert translate(yaml.safe_load(launch.config_path.read_text()), "file").notes == []


def test_shipped_config_names_rewards_that_can_be_created(launch: RunSettings) -> None:
    for part in [*launch.by_source(), *launch.by_evaluation()]:
        specs = part.config.dataset.rewards()
        assert specs
        for spec in specs:
            create_reward(spec.type, spec.params)


def test_shipped_config_has_steps_of_whole_groups(launch: RunSettings) -> None:
    block = launch.config.trainer_block()
    settings = TrainerSettings.model_validate(block)
    assert not block or settings.sequences_per_step % launch.config.group_size == 0


def test_shipped_config_names_its_data_set_and_its_prompt(launch: RunSettings) -> None:
    for part in [*launch.by_source(), *launch.by_evaluation()]:
        dataset = part.config.dataset
        if dataset.dataset_path is not None:
            assert (CONFIGS / dataset.dataset_path).exists()
        else:
            assert dataset.dataset_name or dataset.rows
        assert dataset.prompt_template is not None or "prompt_field" in dataset.model_fields_set
        assert dataset.gold_field
        assert dataset.max_tokens < launch.config.max_token_length


def test_shipped_local_data_sets_have_the_columns() -> None:
    from gristmill_env.data.dataset import PromptDataset

    for name in ("quickstart", "dataset_local"):
        config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        item = PromptDataset(DatasetConfig.model_validate(config["dataset"]), CONFIGS).item(0)
        assert item.prompt.startswith("What is")
        assert item.answer is not None
        assert "####" in item.answer
