"""The plan of an evaluation: which rows it measures, how it samples them, and which answers count as right."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill_env.commands import EvaluateOptions
from gristmill_env.errors import EvaluationError
from gristmill_env.evaluation.plan import (
    Plan,
    count_training_rows,
    evaluation_tasks,
    evaluations_folder,
    make_plan,
    number_of_prompts,
    training_datasets,
)
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import Task

CONFIG = """
dataset:
  dataset_path: train.jsonl
  prompt_field: question
  answer_field: answer
  temperature: 0.7
  top_p: 0.9
  reward_functions: [length, format, accuracy]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, count in (("train", 9), ("test", 5)):
        rows = [{"question": f"{name} {n}", "answer": f"#### {n}"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(CONFIG)
    return tmp_path


def launch(folder: Path, *flags: str) -> RunSettings:
    return RunSettings.read(["--config", "sums", *flags], {"GRISTMILL_CONFIG_DIR": str(folder)}, "test")


def evaluation_task(run: RunSettings) -> Task:
    (task,) = evaluation_tasks(run)
    return task


def planned(folder: Path, *flags: str, limit: int | None = None) -> Plan:
    read = launch(folder, *flags)
    return make_plan(evaluation_task(read), model="tiny", weights="1.20", creation="c1", limit=limit)


def test_evaluation_reads_rows_in_file_order(folder: Path) -> None:
    dataset = evaluation_task(launch(folder)).dataset
    assert [dataset.item(row).prompt for row in range(9)] == [f"train {row}" for row in range(9)]


@pytest.mark.parametrize(
    ("flags", "first", "count"),
    [
        ((), "train 0", 9),
        (("--eval_dataset_path", "test.jsonl"), "test 0", 5),
        (("--split", "train[2:]", "--eval_dataset_path", "test.jsonl"), "test 0", 5),
        (("--eval_dataset_name", "test.jsonl", "--eval_split", "test[1:]"), "test 1", 4),
        (("--eval_split", "test[6:]"), "train 6", 3),
        (("--split", "train[:3]", "--eval_split", "train[3:]"), "train 3", 6),
    ],
)
def test_evaluation_set_follows_the_flags(folder: Path, flags: tuple[str, ...], first: str, count: int) -> None:
    dataset = evaluation_task(launch(folder, *flags)).dataset
    assert (dataset.item(0).prompt, len(dataset)) == (first, count)
    assert launch(folder, *flags).config.dataset.has_evaluation_set == bool([f for f in flags if "--eval" in f])


@pytest.mark.parametrize(
    ("flags", "seen", "prompts"),
    [
        (("--eval_dataset_path", "test.jsonl"), 0, 5),
        (("--split", "train[:3]", "--eval_split", "train[3:]"), 0, 6),
        (("--split", "train[:7]", "--eval_split", "test"), 7, 9),  # one file: the name of a split means nothing
        (("--split", "train[:7]", "--eval_split", "train[4:]"), 3, 5),
        (("--eval_dataset_path", "copy.json"), 9, 9),
        (("--eval_dataset_path", "./train.jsonl", "--eval_limit", "4"), 4, 4),
        (("--split", "train[:7]", "--eval_dataset_path", "copy.json", "--eval_split", "train"), 7, 9),
    ],
)
def test_rows_of_an_evaluation_that_are_training_rows_are_counted(
    folder: Path, flags: tuple[str, ...], seen: int, prompts: int
) -> None:
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = [{"id": n, "answer": row["answer"], "question": f"{row['question']} \n"} for n, row in enumerate(rows)]
    (folder / "copy.json").write_text(json.dumps(rows))
    run = launch(folder, *flags)
    training, evaluated = training_datasets(run, None), evaluation_task(run).dataset
    assert training is not None
    assert number_of_prompts(run.config.dataset, len(evaluated)) == prompts
    assert count_training_rows(evaluated, prompts, *training) == seen


def test_training_rows_are_counted_by_their_prompts_alone(folder: Path) -> None:
    rows = [{"question": f"train {n}", "answer": str(n)} for n in (3, 3, 4, 99)]
    (folder / "copy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = launch(folder, "--eval_dataset_path", "copy.jsonl")
    training, evaluated = training_datasets(run, None), evaluation_task(run).dataset
    assert training is not None
    assert count_training_rows(evaluated, 4, *training) == 3


@pytest.mark.slow
def test_evaluation_is_compared_with_every_training_row(folder: Path) -> None:
    rows = "".join(f'{{"question": "q {n}", "answer": "{n}"}}\n' for n in range(50_003))
    (folder / "train.jsonl").write_text(rows)
    run = launch(folder, "--eval_split", "train[50000:]")
    training, evaluated = training_datasets(run, None), evaluation_task(run).dataset
    assert training is not None
    assert count_training_rows(evaluated, len(evaluated), *training) == 3


@pytest.mark.slow
def test_plan_samples_one_completion_greedily_and_several_as_in_training(folder: Path) -> None:
    greedy, sampled = planned(folder).sampling, planned(folder, "--eval_samples", "4").sampling
    assert (greedy.temperature, greedy.top_p) == (0, 1)
    assert (sampled.temperature, sampled.top_p) == (0.7, 0.9)
    assert planned(folder, "--eval_temperature", "0.2").sampling.temperature == 0.2
    with raises(ConfigError, "invalid_settings", problems={"dataset": "greedy_samples"}):
        planned(folder, "--eval_samples", "4", "--eval_temperature", "0")


@pytest.mark.slow
def test_number_of_prompts_follows_the_limit(folder: Path) -> None:
    assert planned(folder).prompts == 9
    assert planned(folder, limit=4).prompts == 4
    assert planned(folder, "--eval_limit", "6", limit=4).prompts == 6
    assert planned(folder, "--eval_limit", "60").prompts == 9


def test_plan_uses_the_first_comparing_reward_for_correctness(folder: Path) -> None:
    assert (planned(folder).decides, planned(folder).compares) == ("accuracy", True)
    without = planned(folder, "--reward_functions", "length", "format")
    assert (without.decides, without.compares) == ("length", False)


@pytest.mark.slow
def test_plan_digest_depends_only_on_settings_that_change_results(folder: Path) -> None:
    plan = planned(folder)
    for same in (("--seed", "7"), ("--max_eval_workers", "2"), ("--group_size", "3"), ("--testing",)):
        assert planned(folder, *same).digest == plan.digest
    for other in (
        ("--max_tokens", "9"),
        ("--system_prompt", "Think."),
        ("--eval_limit", "3"),
        ("--reward_functions", "accuracy"),
        ("--max_token_length", "99"),
    ):
        assert planned(folder, *other).digest != plan.digest


@pytest.mark.slow
def test_what_a_plan_could_not_find_out_differs_from_nothing(folder: Path) -> None:
    plan = planned(folder)
    away = msgspec.structs.replace(plan, creation=None, training_rows=None)
    assert plan.differences(away) == away.differences(plan) == []
    assert plan.differences(msgspec.structs.replace(plan, creation="c2", samples=4)) != []


def test_evaluation_settings_are_not_in_the_record_of_a_run(folder: Path) -> None:
    measured = launch(folder, "--eval_split", "test", "--eval_samples", "4", "--steps_per_eval", "5")
    assert measured.config.recorded("tiny") == launch(folder).config.recorded("tiny")


def test_evaluations_folder_follows_the_settings(folder: Path, tmp_path: Path) -> None:
    assert evaluations_folder(launch(folder)) == Path("runs/sums/evaluations")
    assert evaluations_folder(launch(folder, "--data_dir_to_save_evals", str(tmp_path))) == tmp_path
    assert evaluations_folder(launch(folder, "--data_dir_to_save_evals", "evals")) == Path("runs/sums/evals")


def test_compare_takes_at_most_two_evaluations(folder: Path) -> None:
    with raises(ConfigError, "invalid_settings", problems={"compare": "too_long"}):
        RunSettings.read_with(EvaluateOptions, ["--compare", "a", "b", "c"], {}, "test")


NAMED = """
sources:
  - {name: sums, dataset: {dataset_path: train.jsonl, eval_dataset_path: test.jsonl}}
  - {name: words, dataset: {dataset_path: train.jsonl}}
evaluations:
  - {name: hard, dataset: {dataset_path: test.jsonl, split: "test[3:]", eval_samples: 4}, rewards: [accuracy]}
"""


def test_evaluations_of_a_run_are_those_of_its_sources_and_its_own(folder: Path) -> None:
    (folder / "sums.yaml").write_text(CONFIG.replace("  dataset_path: train.jsonl\n", "") + NAMED)
    run = launch(folder)
    sums, hard = evaluation_tasks(run)
    assert [sums.name, hard.name] == ["sums", "hard"]
    assert [len(sums.dataset), len(hard.dataset)] == [5, 2]
    assert [sums.scorer.names, hard.scorer.names] == [["length", "format", "accuracy"], ["accuracy"]]
    plans = [make_plan(task, model="tiny", weights=None, creation=None) for task in (sums, hard)]
    assert [plan.samples for plan in plans] == [1, 4]
    assert [plan.settings["evaluation"] for plan in plans] == ["sums", "hard"]
    compared = [training_datasets(run, name) for name in ("sums", "hard")]
    assert [len(datasets or ()) for datasets in compared] == [1, 2]
    assert "evaluations" not in run.config.recorded("tiny")


@pytest.mark.slow
def test_evaluation_takes_the_rows_of_the_run_if_it_names_none(folder: Path) -> None:
    evaluations = "evaluations:\n  - {name: rest, dataset: {split: 'train[7:]'}}\n"
    (folder / "sums.yaml").write_text(CONFIG + evaluations)
    (task,) = evaluation_tasks(launch(folder))
    assert (task.name, task.dataset.item(0).prompt, len(task.dataset)) == ("rest", "train 7", 2)
    own, named = evaluation_tasks(launch(folder, "--eval_split", "train[:3]"))
    assert [own.name, named.name] == [None, "rest"]
    assert [len(own.dataset), len(named.dataset)] == [3, 2]


def test_run_of_sources_without_an_evaluation_set_has_none_by_default(folder: Path) -> None:
    sources = "sources: [{name: sums, dataset: {dataset_path: train.jsonl}}]\n"
    (folder / "sums.yaml").write_text(CONFIG.replace("  dataset_path: train.jsonl\n", "") + sources)
    with raises(EvaluationError, "no_evaluation_set"):
        evaluation_tasks(launch(folder))


@pytest.mark.parametrize(
    ("evaluations", "problem"),
    [
        ("[{name: a}, {name: a}]", "duplicate_name"),
        ("[{name: a, dataset: {eval_split: test}}]", "eval_key_in_evaluation"),
        ("[{name: a, rewards: [accuracy], dataset: {reward_functions: [length]}}]", "values_contradict"),
        ("[{name: a, agent: external}]", "unknown_key"),
        ("[{name: dataset}]", "name_taken"),
    ],
)
def test_evaluations_that_contradict_are_refused(folder: Path, evaluations: str, problem: str) -> None:
    (folder / "sums.yaml").write_text(f"{CONFIG}  eval_split: test\nevaluations: {evaluations}\n")
    with pytest.raises(ConfigError) as raised:
        launch(folder)
    assert problem in raised.value.values["problems"].values()
