"""Which files are read as Atropos' files: never one of ours, whatever mistake it contains."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill_env.atropos.translate import sign_of_atropos
from gristmill_env.run_settings import RunSettings

DATASET = {"dataset_name": "a/b", "prompt_field": "q"}


@pytest.mark.parametrize(
    ("values", "quoted"),
    [
        ({"env": {"group_size": 4}}, "'env'"),
        ({"openai": [], "slurm": False}, "'openai'"),
        ({"dataset": DATASET, "generation": {}}, "'generation'"),
        ({"dataset": {**DATASET, "reward_funcs": []}}, "'dataset.reward_funcs'"),
        ({"dataset": {**DATASET, "accuracy_reward_weight": 1}}, "'dataset.accuracy_reward_weight'"),
        ({"dataset": {**DATASET, "max_generations_per_prompt": 1}}, "'dataset.max_generations_per_prompt'"),
        ({"use_local_agents": True, "dataset": DATASET}, "'use_local_agents'"),
        ({"batch_size": -1, "dataset": DATASET}, "'batch_size' is -1"),
        ({"inference_weight": -1, "dataset": DATASET}, "'inference_weight' is -1"),
        ({"dataset": DATASET, "server_configs": {"base_url": "http://x"}}, "'server_configs'"),
        ({"dataset": DATASET, "server_configs": [{"health_check": False}]}, "'server_configs.health_check'"),
        ({"server_configs": [{"rolling_buffer_length": 9}]}, "'server_configs.rolling_buffer_length'"),
        (DATASET, "'dataset_name'"),
        ({"config_format": "atropos", "dataset": DATASET}, "config_format"),
    ],
)
def test_atropos_file_is_recognized_by_its_keys(values: dict[str, object], quoted: str) -> None:
    assert quoted in (sign_of_atropos(values, "file") or "")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"dataset": DATASET},
        {"dataset": DATASET, "trainer": {}, "group_size": 4},
        {"group_size": 4, "batch_size": 8, "max_batches_offpolicy": 1, "server_configs": [{"timeout": 3}]},
        {"dataset": {**DATASET, "promt_field": "q"}, "gruop_size": 4, "reward_function": []},
        {"dataset": DATASET, "dataset_name": "at the wrong place"},
        {"config_format": "gristmill", "env": {}},
    ],
)
def test_gristmill_files_are_not_read_as_atropos_files(values: dict[str, object]) -> None:
    assert sign_of_atropos(values, "file") is None


@pytest.mark.parametrize(
    ("text", "theirs", "ours"),
    [
        ("trainer: {}\ndataset: {reward_funcs: [format]}\n", "'dataset.reward_funcs'", "trainer"),
        ("run_id: x\nprompt_field: q\n", "'prompt_field'", "run_id"),
        ("env: {}\ndataset: {seed: 1}\n", "'env'", "dataset.seed"),
    ],
)
def test_keys_of_both_kinds_are_an_error_that_names_both(tmp_path: Path, text: str, theirs: str, ours: str) -> None:
    (tmp_path / "mixed.yaml").write_text(text)
    with raises(ConfigError, "config_formats_mixed", key=ours) as raised:
        RunSettings.read(["--config", str(tmp_path / "mixed.yaml")], {}, "test")
    assert theirs in raised.value.values["mark"]
    assert f"'{ours}'" in str(raised.value)


def test_config_format_can_be_named_explicitly(tmp_path: Path) -> None:
    plain = tmp_path / "plain.yaml"
    plain.write_text("dataset: {dataset_name: a/b, prompt_field: q}\nmy_note: x\n")
    problems = {"my_note": "unknown_key"}
    with raises(ConfigError, "unknown_key", where=str(plain), problems=problems) as error:
        RunSettings.read(["--config", str(plain)], {}, "test")
    assert "--config_format atropos" in str(error.value)
    ours = tmp_path / "ours.yaml"
    ours.write_text("dataset: {dataset_name: a/b, prompt_field: q}\ntrainer: {}\nmy_note: x\n")
    with raises(ConfigError, "unknown_key", where=str(ours), problems=problems) as error:
        RunSettings.read(["--config", str(ours)], {}, "test")
    assert "atropos" not in str(error.value)
    launch = RunSettings.read(["--config", str(plain), "--config_format", "atropos"], {}, "test")
    assert launch.config.dataset.temperature == 0.7
    plain.write_text("config_format: atropos\nrun_id: mine\ntrainer: {training_steps: 7}\nreward_funcs: [format]\n")
    config = RunSettings.read(["--config", str(plain)], {}, "test").config
    assert (config.run_id, config.trainer_block()["training_steps"]) == ("mine", 7)
    with raises(ConfigError, "unknown_config_format", where="file", known=["atropos", "gristmill"]):
        sign_of_atropos({"config_format": "verl"}, "file")
