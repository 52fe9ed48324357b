"""`serve` with an evaluation set, against the real API and a real vLLM."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from tests.integration.env.conftest import Environments, HandTrainer

from gristmill_env.evaluation.folder import read_evaluation

FLAGS = ("--eval_split", "train[30:36]", "--steps_per_eval", "2", "--max_eval_workers", "2")


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_serve_evaluates_a_run_from_its_first_version_to_its_last(
    environments: Environments, trainer: HandTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "evals"
    env = environments.here(trainer.url, *FLAGS, "--data_dir_to_save_evals", str(folder))
    trainer.take(label="default")  # the server has lost the weights, so its weights must not be measured
    time.sleep(2.5)
    assert trainer.api.metrics("sums", "eval") == []
    trainer.label("1.0")
    groups = trainer.train(until=3)
    trainer.api.finish("sums", trainer.incarnation)
    env.join()

    assert len(groups) == 6
    rows = trainer.api.metrics("sums", "eval")
    assert [row.step for row in rows] == [0, 2, 3]
    # Rollouts wait, so the trainer cannot continue, and each evaluation measures one version alone.
    assert [row.values["versions"] for row in rows] == ["1.0", "1.2", "1.3"]
    for row in rows:
        assert (row.values["prompts"], row.values["samples"], row.values["temperature"]) == (6, 1, 0)
        assert 0 <= row.values["reward/length"] <= 1
    kept = sorted(folder.iterdir())
    assert [path.name.partition("-")[0] for path in kept] == ["1.0", "1.2", "1.3"]
    for path in kept:
        assert [group.prompt for group in read_evaluation(path)] == [f"What is {n} + 1?" for n in range(30, 36)]
        assert {"results.json", "report.html"} <= {file.name for file in path.iterdir()}
    # All are the same weights under three names, with greedy sampling.
    texts = [[group.completions[0].text for group in read_evaluation(path)] for path in kept]
    assert texts[0] == texts[1] == texts[2]
    assert (2, "data set 'sums.jsonl' (split train[30:36])") in [record.args for record in caplog.records]
    assert caplog.text.count("evaluated run=sums") == 3


@pytest.mark.long
def test_two_replicas_evaluate_once_and_continue_rollouts_meanwhile(
    environments: Environments, trainer: HandTrainer, tmp_path: Path
) -> None:
    folder = tmp_path / "evals"
    flags = (*FLAGS, "--data_dir_to_save_evals", str(folder), "--eval_handling", "NONE", "--eval_samples", "2")
    env = environments.process(trainer.url, *flags)
    other = environments.here(trainer.url, *flags)
    trainer.take()
    groups = trainer.train(until=4)
    trainer.api.finish("sums", trainer.incarnation)
    assert environments.ends(env) == 0
    other.join()
    assert sorted(group.row for group in groups) == list(range(8))
    steps = [row.step for row in trainer.api.metrics("sums", "eval")]
    assert steps == sorted(steps)
    assert steps[0] <= 1
    assert steps[-1] == 4
    assert len(list(folder.iterdir())) == len(steps) <= 3


def test_without_an_evaluation_set_nothing_is_evaluated(environments: Environments, trainer: HandTrainer) -> None:
    env = environments.here(trainer.url, "--steps_per_eval", "1")
    trainer.take()
    trainer.train(until=2)
    trainer.api.finish("sums", trainer.incarnation)
    env.join()
    assert trainer.api.metrics("sums", "eval") == []
