"""The configuration that a third party's environment may have sent when it opened the run."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.errors import raises

from gristmill import ConfigError, Protocol, RunRecord, RunState
from gristmill.hyperparameters import TRAINER_ONLY
from gristmill_trainer.settings import dataset_name, longest_completion, reward_names, trainer_block


def _run(env: dict[str, Any], protocol: Protocol = Protocol.GRISTMILL) -> RunRecord:
    return RunRecord.model_construct(run_id="run", state=RunState.OPEN, env=env, protocol=protocol, group_size=2)


def test_run_config_reads_our_environments_report() -> None:
    rewards = ["length", {"type": "accuracy", "weight": 2}]
    run = _run(
        {"dataset": {"dataset_name": "a/b", "max_tokens": 24, "reward_functions": rewards}, "trainer": {"seed": 1}}
    )
    assert (dataset_name(run), longest_completion(run), reward_names(run)) == ("a/b", 24, ["length", "accuracy"])
    assert trainer_block(run) == {"seed": 1}


def test_run_config_reads_all_sources() -> None:
    words = {"dataset_path": "words.jsonl", "max_tokens": 48, "reward_functions": ["accuracy", "format", "format"]}
    sources = {
        "sums": {"dataset": {"dataset_name": "a/b", "reward_functions": ["accuracy"]}},
        "words": {"dataset": words},
    }
    run = _run({"dataset": {"max_tokens": 256}, "sources": sources})
    assert (dataset_name(run), longest_completion(run)) == ("a/b, words.jsonl", 48)
    assert reward_names(run) == ["accuracy", "format", "format"]


@pytest.mark.parametrize("dataset", [None, "sums", ["sums"], {"max_tokens": "many", "reward_functions": "length"}])
def test_run_config_ignores_reports_of_unknown_form(dataset: Any) -> None:
    """docs/api.md opens a run with {"dataset": "sums"}."""
    run = _run({"dataset": dataset})
    assert (dataset_name(run), longest_completion(run), reward_names(run)) == ("unknown", None, [])
    assert trainer_block(run) == {}
    assert "Atropos" in dataset_name(_run({}, Protocol.ATROPOS))


@pytest.mark.parametrize(
    ("block", "code", "values"),
    [
        ("fast", "not_a_mapping", {}),
        ({"my_temperature": 0.7}, "unknown_key", {}),
        *(({"seed": 1, key: "a"}, "trainer_only_key", {"keys": [key]}) for key in sorted(TRAINER_ONLY)),
    ],
)
def test_block_that_is_not_of_hyperparameters_is_refused(block: Any, code: str, values: dict[str, Any]) -> None:
    """The API stores any block, and an environment's token is enough to open a run. Plug-ins, paths, URLs, uploads and
    trackers of a run must not reach the trainer's machine."""
    with raises(ConfigError, code, **values) as raised:
        trainer_block(_run({"trainer": block}))
    assert "run run: trainer" in str(raised.value)
