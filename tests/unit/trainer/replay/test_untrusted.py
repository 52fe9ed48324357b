"""The settings that a record may decide, and those for which a person must say that the record is trusted."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.errors import raises

from gristmill.internal.config_files import load_yaml
from gristmill.internal.settings import merge
from gristmill_env.rewards.registry import ENTRY_POINTS, find, reward_names
from gristmill_env.settings.run import EnvConfig
from gristmill_env.settings.task import CurriculumSpec
from gristmill_trainer.replay.fork import at_each_source, in_file
from gristmill_trainer.replay.untrusted import UntrustedError, dollars_kept, recorded_environment

ROOT = Path(__file__).parents[4]
CONFIGS = ROOT / "configs"


EMBEDDINGS = {"type": "cosine_scaled", "params": {"model_name": "gpt2"}}


def recorded(**changes: Any) -> dict[str, Any]:
    """Returns the environment's part of the record of the quickstart, with changes."""
    values = merge(load_yaml(CONFIGS / "quickstart.yaml"), changes)
    found = EnvConfig(**values).recorded("tiny")
    return {name: value for name, value in found.items() if name not in ("trainer", "model")}


def test_settings_of_the_quickstart_need_no_trust() -> None:
    env = recorded()
    assert recorded_environment(env, {}, CONFIGS, trust=False) == env


def test_recorded_curriculum_needs_no_trust() -> None:
    env = recorded(curriculum={"rest": 5})
    assert recorded_environment(env, {}, CONFIGS, trust=False) == env
    assert EnvConfig(**in_file(env, CONFIGS)).curriculum == CurriculumSpec(rest=5)


MIXTURE = """
dataset: {prompt_field: question, answer_field: answer}
sources:
  - name: sums
    weight: 3
    dataset: {dataset_path: datasets/quickstart/train.jsonl}
    rewards: [{type: format, weight: 0.2}, {type: accuracy, weight: 0.8}]
  - name: guess
    environment: {type: guess, params: {tries: 2}}
    dataset: {dataset_path: datasets/quickstart/train.jsonl, seed: 7}
    rewards: [episode]
"""


def mixture() -> dict[str, Any]:
    """Returns the environment's part of the record of a configuration with sources."""
    found = EnvConfig(**yaml.safe_load(MIXTURE)).recorded("tiny")
    return {name: value for name, value in found.items() if name not in ("trainer", "model")}


def test_recorded_sources_become_a_configuration_file_with_the_same_record() -> None:
    env = mixture()
    assert recorded_environment(env, {}, CONFIGS, trust=False) == env
    again = EnvConfig(**in_file(env, CONFIGS)).recorded("tiny")
    for source in again["sources"].values():
        assert Path(source["dataset"]["dataset_path"]).is_absolute()
        source["dataset"]["dataset_path"] = "datasets/quickstart/train.jsonl"
    assert {name: again[name] for name in env} == env


def test_change_of_the_data_set_is_one_of_every_source() -> None:
    changes = {"dataset": {"temperature": 0.5}, "sources": {"sums": {"dataset": {"temperature": 0.7}}}}
    config = merge(in_file(merge(mixture(), at_each_source(changes, mixture())), CONFIGS), {})
    sums, guess = EnvConfig(**config).by_source().values()
    assert (sums.dataset.temperature, guess.dataset.temperature) == (0.7, 0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {"type": "mine.py:Game"}},
        {"agent": {"command": ["sh"]}},
        {"dataset": {"rows": "mine.py:load"}},
        {"dataset": {"dataset_path": "/etc/passwd"}},
        {"dataset": {"reward_functions": ["evil.py:score"]}},
    ],
    ids=str,
)
def test_sources_of_a_record_need_trust_as_a_run_does(changes: dict[str, Any]) -> None:
    env = merge(mixture(), {"sources": {"guess": changes}})
    with raises(UntrustedError, "untrusted_record"):
        recorded_environment(env, {}, CONFIGS, trust=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": {"reward_functions": ["origin/step-000060/evil.py:score"]}},
        {"dataset": {"reward_functions": [{"type": "os:system", "weight": 0.5}]}},
        {"dataset": {"reward_functions": [{"type": "trl:trl.rewards:think"}]}},
        {"dataset": {"reward_functions": [{"type": "accuracy", "params": {"base_url": "http://10.0.0.1"}}]}},
        {"dataset": {"reward_functions": [{"type": "similarity", "params": {"model": "gpt2"}}]}},
        {"dataset": {"reward_functions": [{"type": "combined", "params": {"rewards": [{"type": "a.py:f"}]}}]}},
        {"dataset": {"reward_functions": [{"type": "cosine_scaled", "params": {"model_name": "gpt2", "local": True}}]}},
        {"dataset": {"reward_functions": [{"type": "cosine_scaled", "params": {"local": True}}]}},
        {"dataset": {"reward_functions": [{"type": "combined", "params": {"rewards": [EMBEDDINGS]}}]}},
        {"dataset": {"reward_functions": [{"type": "of_a_package", "params": {"an_option": "gpt2"}}]}},
        {"environment": {"type": "guess", "params": {"judge_model": "gpt2"}}},
        {"environment": {"type": "guess", "params": {"deep": [{"datasetPath": "x"}]}}},
        {"environment": {"type": "mine.py:Game"}},
        {"environment": {"type": "package.module:Game"}},
        {"environment": {"type": "guess", "params": {"file": "x"}}},
        {"environment": {"type": "guess", "params": {"deep": [{"where": "../secret"}]}}},
        {"dataset": {"dataset_path": None, "dataset_name": "owner/data"}},
        {"dataset": {"dataset_path": "/etc/passwd"}},
        {"dataset": {"dataset_path": "../README.md"}},
        {"dataset": {"another_key": {"n": 3}}},
        {"dataset": {"prompt_field": "${HF_TOKEN}"}},
        {"a_key_of_a_later_version": "x"},
        {"dataset": {"a_key_of_a_later_version": "x"}},
    ],
    ids=str,
)
def test_code_files_downloads_and_addresses_of_a_record_need_trust(changes: dict[str, Any]) -> None:
    env = merge(recorded(), changes)
    with raises(UntrustedError, "untrusted_record"):
        recorded_environment(env, {}, CONFIGS, trust=False)
    assert recorded_environment(env, {}, CONFIGS, trust=True) == env


def options_of_shipped_rewards() -> dict[str, set[str]]:
    """Returns the options of each reward that the environment's package registers."""
    offered = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    names = [name for name in reward_names() if name not in offered or offered[name].value.startswith("gristmill_env")]
    found = {name: find(name) for name in names}
    return {
        name: set(definition.options)
        for name, definition in found.items()
        if definition.target.__module__.startswith("gristmill_env.")
    }


def test_options_of_shipped_rewards_need_no_trust_unless_they_load_something() -> None:
    needs = set()
    options = options_of_shipped_rewards()
    assert {"accuracy", "cosine_scaled", "combined", "mcq", "r1"} <= set(options)
    for name, known in options.items():
        for option in known:
            env = {"dataset": {"reward_functions": [{"type": name, "params": {option: 1}}]}}
            try:
                recorded_environment(env, {}, CONFIGS, trust=False)
            except UntrustedError:
                needs.add((name, option))
    embeddings = {("cosine_scaled", option) for option in ("base_url", "model_name", "api_key", "local")}
    judges = {(name, option) for name in ("judge", "judge_group") for option in options[name] - {"max_tokens"}}
    assert needs == embeddings | judges


def test_own_value_replaces_a_value_that_needs_trust() -> None:
    env = recorded(dataset={"reward_functions": ["evil.py:score"]})
    own = {"dataset": {"reward_functions": ["accuracy"]}}
    kept = recorded_environment(env, own, CONFIGS, trust=False)
    assert "reward_functions" not in kept["dataset"]
    assert kept["dataset"]["prompt_field"] == "question"


def test_link_out_of_the_folder_of_configurations_needs_trust(tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text("{}\n")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "rows.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with raises(UntrustedError, "untrusted_record"):
        recorded_environment({"dataset": {"dataset_path": "rows.jsonl"}}, {}, tmp_path / "configs", trust=False)


def test_no_variable_of_a_record_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    env = {"dataset": {"system_prompt": "Say ${HF_TOKEN} or $$ and ${OTHER:-x}.", "stop": ["$${HF_TOKEN}"]}}
    path = tmp_path / "fork.yaml"
    path.write_text(yaml.safe_dump(dollars_kept(env)))
    assert load_yaml(path) == env


def test_record_of_a_run_that_is_nested_too_deep_is_refused() -> None:
    params: dict[str, Any] = {}
    for _ in range(600):
        params = {"a": params or 1}
    with raises(UntrustedError, "untrusted_record"):
        recorded_environment(recorded() | {"environment": {"type": "x", "params": params}}, {}, CONFIGS, trust=False)
