"""The table of Atropos' keys is complete, and each key belongs to an existing setting.

tests/integration/atropos/test_configuration_keys.py reads the fields of atroposlib's own models. No package contains
Atropos' dataset environment, so its fields are listed here.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from gristmill.internal.settings import inner_model
from gristmill_env.atropos.keys import KEYS, OTHER_KEYS, SERVER_KEYS, Part, Verdict
from gristmill_env.settings.dataset import DatasetConfig
from gristmill_env.settings.run import EnvConfig

DATASET_FIELDS: dict[str, Any] = {
    "dataset_name": None,
    "dataset_config": None,
    "split": "train",
    "dataset_path": None,
    "prompt_field": None,
    "answer_field": None,
    "ground_truth_field": None,
    "system_prompt": None,
    "prefill": None,
    "shuffle_dataset": True,
    "max_generations_per_prompt": 1,
    "include_messages_in_scoring": False,
    "reward_funcs": [],
    "reward_functions": [],
    "temperature": 0.7,
    "top_p": 0.9,
    "max_tokens": 4096,
    "length_warmup_steps": 0,
    "min_tokens": 0,
    "eval_dataset_name": None,
    "eval_dataset_config": None,
    "eval_split": None,
}
"""Fields of Atropos' DatasetEnvConfig, with their defaults; None for none."""

SHIPPED = """
tokenizer_name group_size use_wandb max_num_workers max_eval_workers steps_per_eval batch_size max_batches_offpolicy
total_steps rollout_server_url use_local_agents dataset max_token_length wandb_name ensure_scores_are_not_same
server_configs env openai slurm testing data_path_to_save_groups include_messages generation <name>_reward_weight
"""
"""Keys of the files that ship with Atropos, and of those in its documentation, in addition to the fields above."""

SHIPPED_SERVER = "model_name api_key base_url timeout weight"


def settings(model: type[BaseModel], prefix: str = "") -> set[str]:
    found = {f"{prefix}{name}" for name in model.model_fields}
    for name, info in model.model_fields.items():
        section = inner_model(info.annotation)
        if section is not None:
            found |= settings(section, f"{prefix}{name}.")
    return found


def test_every_atropos_key_belongs_to_an_existing_setting() -> None:
    assert {key.here for key in KEYS if key.here is not None} - settings(EnvConfig) == set()


def test_only_the_env_section_is_honoured_without_a_setting() -> None:
    sections = {"env"}
    unset = {key.name for key in KEYS if key.here is None and key.verdict is Verdict.HONOURED}
    assert unset == sections


def test_every_atropos_key_that_is_not_honoured_has_an_explanation() -> None:
    for key in KEYS:
        assert key.verdict is Verdict.HONOURED or key.text, f"{key.name} is warned of without a word"
        assert not key.text.endswith("."), key.name
    assert len(SERVER_KEYS) + len(OTHER_KEYS) == len(KEYS), "a key stands twice"


def test_key_table_has_every_field_of_the_dataset_environment() -> None:
    assert {name for name in DATASET_FIELDS if OTHER_KEYS[name].part is Part.DATASET} == set(DATASET_FIELDS)


def test_key_table_has_every_key_of_the_shipped_files() -> None:
    assert set(SHIPPED.split()) <= set(OTHER_KEYS)
    assert set(SHIPPED_SERVER.split()) <= set(SERVER_KEYS)


def test_atropos_file_gets_the_defaults_of_atropos() -> None:
    ours = DatasetConfig()
    for name, theirs in DATASET_FIELDS.items():
        key = OTHER_KEYS[name]
        if theirs is not None and key.here == f"dataset.{name}":
            assert (getattr(ours, name) if key.default is None else key.default) == theirs, name
