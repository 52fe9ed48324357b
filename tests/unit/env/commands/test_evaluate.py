"""`evaluate`: its report to the API, and other commands that read an evaluation."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from tests.support.errors import raises
from tests.unit.env.conftest import FailingServer
from tests.unit.env.evaluation.made import judged, plan
from tests.unit.env.inference.conftest import CHAT, answers, said

from gristmill_env.commands import DpoOptions, EvaluateOptions, ReplayOptions, SftOptions, evaluate
from gristmill_env.commands.export import dpo, sft
from gristmill_env.commands.replay import replay
from gristmill_env.errors import EvaluationError
from gristmill_env.evaluation.results import SOURCE_BY_HAND, Evaluated, summarise
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved import read_groups

from .test_rows_that_fail import LONG, REFUSAL, launch


def run_at(url: str) -> RunSettings:
    """Returns the settings that the report reads."""
    config = SimpleNamespace(rollout_server_url=url)
    settings: Any = SimpleNamespace(run_id="sums", config=config, deployment=SimpleNamespace(api_token=None))
    return cast("RunSettings", settings)


def evaluated(creation: str | None) -> Evaluated:
    made, records = plan(creation=creation), [judged(0, 1.0, 0.0)]
    return Evaluated(made, summarise(made, records), Path(), started=1.0, ended=2.0, resumed=0)


async def test_report_names_the_creation_of_the_evaluated_training(failing_server: FailingServer) -> None:
    path = "/v1/runs/sums/metrics?creation=c1"
    failing_server.answers[path] = lambda: (200, {})
    await evaluate.report_scores(run_at(failing_server.url), {None: evaluated("c1")})
    assert failing_server.asked == [path]
    assert [(body["source"], body["step"]) for body in failing_server.bodies] == [(SOURCE_BY_HAND, 20)]
    await evaluate.report_scores(run_at(failing_server.url), {None: evaluated(None)})
    assert len(failing_server.asked) == 1


async def test_report_that_the_api_refuses_does_not_end_the_command(
    failing_server: FailingServer, caplog: pytest.LogCaptureFixture
) -> None:
    error = {"error": {"code": "other_creation", "message": "the run was created again", "remedy": "start again"}}
    failing_server.answers["/v1/runs/sums/metrics?creation=c1"] = lambda: (409, error)
    with caplog.at_level(logging.WARNING):
        await evaluate.report_scores(run_at(failing_server.url), {None: evaluated("c1")})
    assert "created again" in caplog.text


@pytest.mark.slow
async def test_exports_and_replay_read_an_evaluation_as_they_read_saved_groups(
    tmp_path: Path, failing_server: FailingServer, console: Console
) -> None:
    failing_server.takes_tokens = False
    replies = itertools.cycle(["#### 2", "#### 3"])

    def answer() -> tuple[int, Any]:
        asked = failing_server.now.body["messages"][-1]["content"]
        return REFUSAL if asked == LONG else answers(said(next(replies)))

    failing_server.answers[CHAT] = answer
    run = launch(tmp_path, failing_server.url, ["1 + 1?", LONG, "2 + 2?"])
    dataset = run.config.dataset.model_copy(update={"eval_samples": 2})
    run = dataclasses.replace(run, config=run.config.model_copy(update={"dataset": dataset}))
    folder = tmp_path / "evaluated"
    await evaluate.run_evaluate(run, EvaluateOptions(out=folder), console)
    groups = list(read_groups(folder))
    assert [sorted((one.right, one.extracted) for one in group.completions) for group in groups] == [
        [(False, "3"), (True, "2")],
        [],
        [(False, "3"), (True, "2")],
    ]
    assert [group.reason for group in groups] == [None, "prompt_refused", None]
    alone = RunSettings.read([], {"GRISTMILL_MODELS_DIR": "/nowhere"}, "test")
    await sft(alone, SftOptions(saved=folder, out=tmp_path / "sft.jsonl"), console)
    await dpo(alone, DpoOptions(saved=folder, out=tmp_path / "dpo.jsonl"), console)
    rows = [json.loads(line)["messages"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert [[message["content"] for message in row] for row in rows] == [["1 + 1?", "#### 2"], ["2 + 2?", "#### 2"]]
    pairs = [json.loads(line) for line in (tmp_path / "dpo.jsonl").read_text().splitlines()]
    assert [[pair[side][0]["content"] for side in ("chosen", "rejected")] for pair in pairs] == [
        ["#### 2", "#### 3"]
    ] * 2
    await replay(alone, ReplayOptions(saved=folder, out=tmp_path / "again.jsonl"), console)
    again = list(read_groups(tmp_path / "again.jsonl"))
    assert [group.totals for group in again] == [group.totals for group in groups if group.completions]


SEVERAL = {
    "dataset": {"dataset_path": "rows.jsonl", "prompt_field": "question", "reward_functions": ["length"]},
    "evaluations": [{"name": name, "dataset": {"split": f"train[:{number}]"}} for number, name in enumerate("ab", 1)],
}


@pytest.fixture
def several(tmp_path: Path) -> RunSettings:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?"}\n' * 3)
    (tmp_path / "run.yaml").write_text(json.dumps(SEVERAL))
    return RunSettings.read(["--config", str(tmp_path / "run.yaml")], {}, "test")


def test_evaluate_takes_all_evaluations_or_the_one_that_is_named(several: RunSettings, tmp_path: Path) -> None:
    both = evaluate.chosen_tasks(several, EvaluateOptions(out=tmp_path))
    assert [task.name for task in both] == ["a", "b"]
    folders = [evaluate.folder_of(task, EvaluateOptions(out=tmp_path), several=True) for task in both]
    assert folders == [tmp_path / "a", tmp_path / "b"]
    (one,) = evaluate.chosen_tasks(several, EvaluateOptions(only="b", resume=True))
    assert (one.name, len(one.dataset)) == ("b", 2)
    assert evaluate.folder_of(one, EvaluateOptions(), several=False).name.endswith("-b")


def test_evaluation_set_of_the_run_is_chosen_by_a_word(several: RunSettings, tmp_path: Path) -> None:
    config = several.config.model_copy(
        update={"dataset": several.config.dataset.model_copy(update={"eval_split": "train[:3]"})}
    )
    run = dataclasses.replace(several, config=config)
    (unnamed,) = evaluate.chosen_tasks(run, EvaluateOptions(only="dataset", resume=True))
    assert (unnamed.name, len(unnamed.dataset)) == (None, 3)
    assert evaluate.folder_of(unnamed, EvaluateOptions(out=tmp_path), several=True) == tmp_path / "dataset"
    with raises(EvaluationError, "several_evaluations", known=["dataset", "a", "b"]):
        evaluate.chosen_tasks(run, EvaluateOptions(resume=True))


def test_evaluate_refuses_an_unknown_name_and_flags_that_need_one_evaluation(several: RunSettings) -> None:
    with raises(EvaluationError, "unknown_evaluation", known=["a", "b"]):
        evaluate.chosen_tasks(several, EvaluateOptions(only="c"))
    for options in (EvaluateOptions(resume=True), EvaluateOptions(compare=[Path("x")])):
        with raises(EvaluationError, "several_evaluations", known=["a", "b"]):
            evaluate.chosen_tasks(several, options)
