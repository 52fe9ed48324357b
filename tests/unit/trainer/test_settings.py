"""The configuration that a third party's environment may have sent when it opened the run."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.errors import raises

from gristmill import ConfigError, Protocol, RunRecord, RunState
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
        ({"on_step": "/tmp/a.py:f"}, "trainer_only_key", {"keys": ["on_step"]}),
        ({"push_to_hub": "a/b"}, "trainer_only_key", {"keys": ["push_to_hub"]}),
        ({"resume": "/tmp"}, "trainer_only_key", {"keys": ["resume"]}),
    ],
)
def test_block_that_is_not_of_hyperparameters_is_refused(block: Any, code: str, values: dict[str, Any]) -> None:
    with raises(ConfigError, code, **values) as raised:
        trainer_block(_run({"trainer": block}))
    assert "run run: trainer" in str(raised.value)
