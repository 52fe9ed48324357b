"""Configuration files in Atropos' forms: all load with their original meaning, and each difference is logged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill_env.atropos import translate
from gristmill_env.run_settings import RunSettings
from gristmill_env.settings.dataset import RewardSpec
from gristmill_env.settings.run import EnvConfig

NESTED = """
tokenizer_name: "someone/a-model"
group_size: 8
use_wandb: true
max_num_workers: 256
max_eval_workers: 16
steps_per_eval: 100
batch_size: 1024
max_batches_offpolicy: 3
total_steps: 1000
rollout_server_url: "http://localhost:8000"
use_local_agents: true
dataset:
  dataset_name: "gsm8k"
  dataset_config: "main"
  split: "train"
  prompt_field: "question"
  answer_field: "answer"
  system_prompt: "Think first."
  shuffle_dataset: true
  max_generations_per_prompt: 1
  include_messages_in_scoring: false
  reward_functions:
    - type: "r1"
      weight: 1.5
      params: {format_weight: 0.5, accuracy_weight: 1.0}
    - {type: "cosine_scaled", weight: 0.8, params: {scale_factor: 1.2, min_reward: -1.0, max_reward: 1.0}}
    - {type: "accuracy", weight: 2.0, params: {split_on_think_tag: true}}
    - {type: "format", weight: 0.7, params: {preferred_tags: ["think", "reasoning"], require_all_tags: false}}
    - {type: "reasoning_steps", weight: 1.0, params: {min_steps: 3}}
    - {type: "repetition_penalty", weight: 0.5, params: {threshold: 0.1}}
  max_tokens: 16000
  length_warmup_steps: 100
  min_tokens: 2048
  eval_dataset_name: "gsm8k"
  eval_dataset_config: "main"
  eval_split: "test"
"""

DEBUG = """
tokenizer_name: "someone/a-model"
group_size: 1
use_wandb: false
max_num_workers: 1
max_eval_workers: 0
batch_size: 1
total_steps: 100
rollout_server_url: "http://localhost:8000"
dataset:
  dataset_name: "gsm8k"
  dataset_config: "main"
  split: "train"
  prompt_field: "question"
  answer_field: "answer"
  system_prompt: "Think first."
  shuffle_dataset: true
  max_generations_per_prompt: 1
  include_messages_in_scoring: true
  reward_funcs:
    - "accuracy_reward"
    - "format_reward"
  max_tokens: 4096
  length_warmup_steps: 0
  min_tokens: 200
"""

LOCAL = """
tokenizer_name: "someone/a-model"
group_size: 1
use_wandb: false
max_num_workers: 1
rollout_server_url: "http://localhost:8000"
total_steps: 1
batch_size: 1
steps_per_eval: 5
max_token_length: 4096
wandb_name: "dataset_test_local"
ensure_scores_are_not_same: false
dataset:
  dataset_name: "gsm8k"
  dataset_config: "main"
  split: "train"
  prompt_field: "question"
  answer_field: "answer"
  system_prompt: "Think first."
  prefill: "<think>\\n"
  shuffle_dataset: true
  max_generations_per_prompt: 1
  max_tokens: 4096
  length_warmup_steps: 0
  min_tokens: 0
  temperature: 0.7
  top_p: 0.9
  reward_functions:
    - "accuracy"
    - "format"
  accuracy_reward_weight: 1.0
  format_reward_weight: 0.2
server_configs:
  - model_name: "some-model"
    api_key: ${OPENAI_API_KEY}
    timeout: 600
"""

SECTIONS = """
env:
  group_size: 4
  max_batches_offpolicy: 3
  tokenizer_name: "someone/a-model"
  use_wandb: true
  rollout_server_url: "http://localhost:8000"
  wandb_name: "example_env"
  ensure_scores_are_not_same: true
  data_path_to_save_groups: null
  include_messages: true
  dataset_name: a/b
  prompt_field: question
openai:
  - model_name: "someone/a-model"
    base_url: "http://localhost:9001/v1"
    api_key: "x"
    weight: 1.0
slurm: false
testing: false
"""

FLAT = """
tokenizer_name: someone/a-model
group_size: 2
dataset_name: a/b
prompt_field: question
answer_field: answer
reward_functions: [accuracy]
temperature: 0.5
my_note: hello
server_configs: {model_name: default, base_url: "http://localhost:9001/v1", timeout: 60}
"""

DOCUMENTED = """
dataset:
  dataset_name: gsm8k
  prompt_field: question
  temperature: 0.1
generation:
  temperature: 0.6
  top_p: 0.95
reward_functions:
  - {type: accuracy, weight: 1.0}
"""


@pytest.fixture
def read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Reader:
    caplog.set_level(logging.WARNING)
    return Reader(tmp_path, caplog)


class Reader:
    """Reads a file as `--config` does."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.path = folder / "theirs.yaml"
        self._caplog = caplog

    def __call__(self, text: str, *flags: str, **environ: str) -> EnvConfig:
        self.path.write_text(text)
        return RunSettings.read(["--config", str(self.path), *flags], environ, "test").config

    @property
    def told(self) -> list[str]:
        """Returns the warnings, without the file's name."""
        return [record.getMessage().removeprefix(f"{self.path}: ") for record in self._caplog.records]

    def told_of(self, *words: str) -> bool:
        """Returns whether one of the warnings contains all of these names and values."""
        return any(all(word in told for word in words) for told in self.told)


def test_nested_atropos_file_is_translated(read: Reader) -> None:
    config = read(NESTED)
    assert (config.group_size, config.workers, config.use_wandb) == (8, 256, True)
    dataset = config.dataset
    assert (dataset.dataset_name, dataset.dataset_config, dataset.prompt_field) == ("gsm8k", "main", "question")
    assert (dataset.max_tokens, dataset.min_tokens, dataset.length_warmup_steps) == (16000, 2048, 100)
    assert dataset.rewards() == [
        RewardSpec(type="r1", weight=1.5, params={"format_weight": 0.5, "accuracy_weight": 1.0}),
        RewardSpec(
            type="cosine_scaled",
            weight=0.8,
            params={"local": True, "scale_factor": 1.2, "min_reward": -1.0, "max_reward": 1.0},
        ),
        RewardSpec(type="accuracy", weight=2.0, params={"split_on_think_tag": True}),
        RewardSpec(
            type="format", weight=0.7, params={"preferred_tags": ["think", "reasoning"], "require_all_tags": False}
        ),
        RewardSpec(type="reasoning_steps", params={"min_steps": 3}),
        RewardSpec(type="repetition_penalty", weight=0.5, params={"threshold": 0.1}),
    ]
    assert config.trainer_block() == {
        "training_steps": 1000,
        "max_staleness": 3,
        "batch_size": 1024,
        "gradient_accumulation_steps": 1,
    }
    assert "'use_local_agents'" in read.told[0]
    assert any(told.startswith("'use_local_agents' ") for told in read.told)


def test_nested_atropos_file_with_legacy_rewards_is_translated(read: Reader) -> None:
    config = read(DEBUG)
    assert config.dataset.rewards() == [RewardSpec(type="accuracy"), RewardSpec(type="format")]
    assert config.include_messages
    assert (config.group_size, config.trainer_block()["batch_size"]) == (1, 1)


def test_atropos_file_without_evaluation_workers_disables_evaluation() -> None:
    assert translate(yaml.safe_load(DEBUG), "file").values.get("steps_per_eval", 0) == 0
    assert "max_eval_workers" not in translate(yaml.safe_load(DEBUG), "file").values


def test_atropos_reward_weights_apply_to_a_list_of_names(read: Reader) -> None:
    config = read(LOCAL, OPENAI_API_KEY="secret")
    assert config.dataset.rewards() == [RewardSpec(type="accuracy", weight=1.0), RewardSpec(type="format", weight=0.2)]
    assert config.dataset.prefill == "<think>\n"
    assert (config.server.model_name, config.server.api_key, config.server.timeout) == (
        "some-model",
        SecretStr("secret"),
        600,
    )
    assert config.server.base_url == "https://api.openai.com/v1"
    assert read.told_of("base_url", "https://api.openai.com/v1")


def test_atropos_file_with_sections_is_translated(read: Reader) -> None:
    config = read(SECTIONS)
    assert (config.group_size, config.tokenizer_name, config.wandb_name) == (4, "someone/a-model", "example_env")
    assert (config.include_messages, config.data_path_to_save_groups) == (True, None)
    assert (config.dataset.dataset_name, config.dataset.prompt_field) == ("a/b", "question")
    assert (config.server.model_name, config.server.root_url) == ("someone/a-model", "http://localhost:9001")
    assert not config.testing


def test_flat_atropos_file_is_translated(read: Reader) -> None:
    config = read(FLAT)
    assert (config.group_size, config.dataset.dataset_name, config.dataset.temperature) == (2, "a/b", 0.5)
    assert config.dataset.rewards() == [RewardSpec(type="accuracy")]
    assert (config.server.model_name, config.server.timeout) == (None, 60)
    assert "'dataset_name'" in read.told[0]
    assert read.told_of("'my_note'")


def test_dataset_section_overrides_the_generation_section(read: Reader) -> None:
    config = read(DOCUMENTED)
    assert (config.dataset.temperature, config.dataset.top_p) == (0.1, 0.95)
    assert config.dataset.rewards() == [RewardSpec(type="accuracy")]


def test_atropos_file_uses_atropos_defaults_for_missing_keys(read: Reader) -> None:
    config = read("dataset: {dataset_name: a/b, prompt_field: q, reward_funcs: [format]}\n")
    assert (config.group_size, config.max_num_workers, config.workers) == (4, -1, 8)
    assert (config.dataset.temperature, config.dataset.top_p, config.dataset.max_tokens) == (0.7, 0.9, 4096)
    assert (config.worker_timeout, config.use_wandb, config.max_batches_offpolicy) == (600, True, 3)
    assert config.trainer_block()["training_steps"] == 1000
    assert "batch_size" not in config.trainer_block()
    assert read.told_of("temperature 0.7", "top_p 0.9")


def test_flags_and_variables_override_an_atropos_file(read: Reader) -> None:
    config = read(
        LOCAL,
        "--temperature",
        "1",
        "--group_size",
        "2",
        "--batch_size",
        "2",
        OPENAI_API_KEY="x",
        GRISTMILL_MODEL_URL="http://m:1",
    )
    assert (config.dataset.temperature, config.group_size, config.server.base_url) == (1.0, 2, "http://m:1")


def test_atropos_values_that_mean_unset_are_ignored(read: Reader) -> None:
    config = read(
        "env: {total_steps: -1, batch_size: -1, inference_weight: -1, wandb_name: null, dataset_name: a/b}\n"
        "openai: {model_name: default, tokenizer_name: none, api_key: '', base_url: 'http://h:1'}\n"
    )
    assert (config.batch_size, config.inference_weight, config.wandb_name) == (None, None, None)
    assert config.total_steps is None
    assert (config.server.model_name, config.server.api_key, config.tokenizer_name) == (None, None, None)


def test_atropos_local_path_overrides_a_name(read: Reader) -> None:
    config = read("dataset: {dataset_name: a/b, dataset_path: rows.jsonl, prompt_field: q, reward_funcs: [format]}\n")
    assert (config.dataset.dataset_name, config.dataset.dataset_path) == (None, "rows.jsonl")
    assert read.told_of("dataset_name", "dataset_path")


def test_tokenizer_of_a_server_is_used_if_the_run_has_none(read: Reader) -> None:
    assert read("openai: {tokenizer_name: a/b, base_url: 'http://h:1'}\n").tokenizer_name == "a/b"
    both = "env: {tokenizer_name: c/d}\nopenai: {tokenizer_name: a/b, base_url: 'http://h:1'}\n"
    assert read(both).tokenizer_name == "c/d"


def test_top_p_gives_a_warning_and_is_recorded(read: Reader) -> None:
    config = read(FLAT + "top_p: 0.8\n")
    assert read.told_of("'top_p'", "0.8")
    assert config.recorded("tiny")["dataset"]["top_p"] == 0.8


MISTAKES = [
    (FLAT + "proxy_url: http://h:1\n", "key_refused", "", {"key": "proxy_url"}),
    (FLAT.replace("[accuracy]", "[crossword_format]"), "reward_not_shipped", "", {"name": "crossword_format"}),
    (FLAT.replace("[accuracy]", "7"), "not_a_list", "", {"key": "reward_functions"}),
    (FLAT.replace("[accuracy]", "[{weight: 1}]"), "not_a_reward", "", {"key": "reward_functions"}),
    (
        FLAT.replace("[accuracy]", "[{type: accuracy, params: [1]}]"),
        "not_a_reward",
        "",
        {"key": "reward_functions"},
    ),
    (FLAT + "trainer: fast\nconfig_format: atropos\n", "invalid_settings", "", {"problems": {"trainer": "dict_type"}}),
    (
        FLAT.replace("group_size: 2", "group_size: many"),
        "invalid_settings",
        "",
        {"problems": {"group_size": "int_parsing"}},
    ),
    ("env: 3\n", "not_a_mapping", ": env", {}),
    ("env: {group_size: 2, dataset: gsm8k}\n", "not_a_mapping", ": dataset", {}),
    ("env: {group_size: 2}\nopenai: 3\n", "not_a_mapping", ": openai", {}),
    (LOCAL, "variable_unset", ": server_configs: api_key", {"variable": "OPENAI_API_KEY"}),
]


@pytest.mark.parametrize(("text", "code", "place", "values"), MISTAKES)
def test_atropos_file_with_unsupported_settings_is_refused_with_the_reason(
    read: Reader, text: str, code: str, place: str, values: dict[str, Any]
) -> None:
    with raises(ConfigError, code, where=f"{read.path}{place}", **values):
        read(text)
