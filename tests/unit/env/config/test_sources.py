"""`sources:` the settings that each source has, and the sources that contradict each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill_env.errors import DatasetError
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import load_tasks
from gristmill_env.settings.run import EnvConfig

SUMS = {"name": "sums", "weight": 2, "dataset": {"dataset_path": "sums.jsonl", "max_tokens": 8}}
WORDS = {"name": "words", "dataset": {"dataset_name": "a/words"}, "rewards": ["exact_match"]}
HELD_OUT = {"name": "held", "dataset": {"dataset_path": "held.jsonl"}}
SHARED = {
    "prompt_field": "question",
    "max_tokens": 24,
    "min_tokens": 4,
    "reward_functions": ["length"],
    "eval_limit": 9,
}


def read(folder: Path, *flags: str, **settings: Any) -> RunSettings:
    (folder / "run.yaml").write_text(json.dumps({"dataset": SHARED, "sources": [SUMS, WORDS], **settings}))
    return RunSettings.read(["--config", str(folder / "run.yaml"), *flags], {}, "test")


def test_source_has_its_own_keys_and_those_of_the_run(tmp_path: Path) -> None:
    sums, words = read(tmp_path, environment="guess").by_source()
    assert [sums.source, words.source] == ["sums", "words"]
    assert not sums.config.sources
    dataset = sums.config.dataset
    assert (dataset.dataset_path, dataset.prompt_field, dataset.max_tokens) == ("sums.jsonl", "question", 8)
    assert (dataset.min_tokens, dataset.reward_functions) == (4, ["length"])
    assert words.config.dataset.reward_functions == ["exact_match"]
    assert words.config.dataset.max_tokens == 24
    assert words.config.environment.type == "guess"


def test_flags_and_set_change_what_sources_share_or_one_of_them(tmp_path: Path) -> None:
    flags = ("--max_tokens", "30", "--set", "sources.1.weight=5", "--set", "sources.1.dataset.split=test")
    sums, words = read(tmp_path, *flags).by_source()
    assert [sums.config.dataset.max_tokens, words.config.dataset.max_tokens] == [8, 30]
    assert words.config.dataset.split == "test"
    assert [source.weight for source in read(tmp_path, *flags).config.sources] == [2, 5]


def test_agent_of_a_source_replaces_the_environment_of_the_run(tmp_path: Path) -> None:
    sums, words = read(tmp_path, environment="guess", sources=[{**SUMS, "agent": "a.py:run"}, WORDS]).by_source()
    assert sums.config.agent is not None
    assert (sums.config.environment.type, words.config.environment.type) == ("dataset", "guess")
    assert words.config.agent is None


def test_source_may_be_a_taskset_of_verifiers(tmp_path: Path) -> None:
    tasks = {"name": "tasks", "environment": {"type": "verifiers", "params": {"taskset": "numbers"}}}
    sums, numbers = read(tmp_path, environment="guess", sources=[SUMS, tasks]).by_source()
    assert sums.config.environment.type == "guess"
    assert numbers.config.agent is not None
    assert numbers.config.agent.function == "gristmill_env.adapters.verifiers:run"
    assert numbers.config.dataset.rows == "gristmill_env.adapters.verifiers:rows"
    assert numbers.config.dataset.rows_params == numbers.config.agent.params == {"taskset": "numbers"}


def test_sources_inherit_the_rows_of_the_runs_taskset(tmp_path: Path) -> None:
    environment = {"type": "verifiers", "params": {"taskset": "numbers"}}
    [all_tasks] = read(tmp_path, environment=environment, sources=[{"name": "all"}]).by_source()
    assert all_tasks.config.agent is not None
    assert all_tasks.config.dataset.rows == "gristmill_env.adapters.verifiers:rows"


def test_weights_of_too_many_digits_are_found_before_a_server_is_needed(tmp_path: Path) -> None:
    sources = [{**SUMS, "weight": 0.3333333}, {**WORDS, "weight": 0.6666667}]
    with raises(DatasetError, "weights_too_fine"):
        load_tasks(read(tmp_path, sources=sources))


def test_only_the_address_of_an_adapters_server_is_left_out_of_the_record(tmp_path: Path) -> None:
    params = {"base_url": "http://127.0.0.1:1"}
    for kind, recorded in (("mine.py:Game", params), ("openenv", {})):
        config = read(tmp_path, environment={"type": kind, "params": params}).config
        assert config.environment.recorded()["params"] == recorded


def test_record_has_the_sources_only_if_there_are_some(tmp_path: Path) -> None:
    plain = EnvConfig.model_validate({"dataset": {"dataset_path": "sums.jsonl"}})
    assert "sources" not in plain.recorded("tiny")
    assert plain.by_source() == {None: plain}
    recorded = read(tmp_path).config.recorded("tiny")["sources"]
    assert list(recorded) == ["sums", "words"]
    assert recorded["sums"]["weight"] == 2
    assert recorded["sums"]["dataset"]["max_tokens"] == 8
    assert [reward["type"] for reward in recorded["words"]["dataset"]["reward_functions"]] == ["exact_match"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sources": [SUMS, {**WORDS, "name": "sums"}]}, "duplicate_name"),
        ({"sources": [SUMS, {**WORDS, "weight": 0}]}, "greater_than"),
        ({"sources": [SUMS, {**WORDS, "weight": -1}]}, "greater_than"),
        ({"sources": [SUMS, {"name": "none"}]}, "dataset_unset"),
        ({"sources": [SUMS, {**WORDS, "wieght": 2}]}, "unknown_key"),
        ({"sources": [{**SUMS, "dataset": {"dataset_path": "a", "prompt_feild": "b"}}]}, "unknown_key"),
        ({"sources": [{**SUMS, "rewards": ["mcq"], "dataset": {"reward_functions": ["mcq"]}}]}, "values_contradict"),
        ({"sources": [{**SUMS, "agent": "external", "environment": "guess"}]}, "agent_and_environment"),
        ({"agent": "external"}, "address_taken"),
        ({"dataset": {**SHARED, "dataset_name": "a/b"}}, "rows_beside_sources"),
        ({"dataset": {**SHARED, "eval_split": "test"}}, "rows_beside_sources"),
        ({"agent": "a.py:run", "evaluations": [HELD_OUT]}, "evaluation_without_environment"),
        ({"environment": "verifiers", "evaluations": [HELD_OUT]}, "evaluation_without_environment"),
        ({"environment": {"type": "verifiers", "step_timout": 5}}, "unknown_key"),
        ({"environment": {"type": "verifiers", "params": 5}}, "dict_type"),
    ],
)
def test_sources_that_contradict_are_refused(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, **settings)
    assert problem in raised.value.values["problems"].values(), raised.value


def test_unknown_key_of_a_source_is_named_with_the_nearest(tmp_path: Path) -> None:
    wrong = {**SUMS, "dataset": {"dataset_path": "a", "prompt_feild": "b"}}
    with raises(ConfigError, "unknown_key", problems={"sources.0.dataset.prompt_feild": "unknown_key"}) as raised:
        read(tmp_path, sources=[wrong])
    assert "'prompt_field'" in str(raised.value)
