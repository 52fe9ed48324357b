"""The files for other tools, and the tables for people."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gristmill_env.evaluation.report import show
from gristmill_env.evaluation.results import METRICS_FILE, RESULTS_FILE, Evaluated, row, summarise, write_results
from gristmill_env.evaluation.samples import PromptRecord

from .made import PLAN, judged, prompt, sample

RECORDS = [judged(0, 1, 1), judged(1, 1, 0), prompt(2, [sample(0), sample(0)], max_tokens=5)]


def evaluated(folder: Path, records: list[PromptRecord]) -> Evaluated:
    return Evaluated(PLAN, summarise(PLAN, records), folder, started=100.0, ended=107.5, resumed=1)


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.fixture
def sums(tmp_path: Path) -> Evaluated:
    return evaluated(tmp_path, RECORDS)


def test_lm_eval_shape(sums: Evaluated) -> None:
    write_results(sums)
    found = json.loads((sums.folder / RESULTS_FILE).read_text())
    results = found["results"]["sums"]
    assert results["alias"] == "sums"
    assert results["pass@1,none"] == 0.5
    assert results["pass@1_stderr,none"] == pytest.approx((0.25 / 3) ** 0.5)
    assert results["reward/accuracy,none"] == 0.5
    assert found["n-samples"] == {"sums": {"original": 4, "effective": 3}}
    assert found["n-shot"] == {"sums": 0}
    assert found["higher_is_better"]["sums"]["pass@1"] is True
    assert found["higher_is_better"]["sums"]["truncated"] is False
    assert found["configs"]["sums"]["repeats"] == 2
    assert found["configs"]["sums"]["generation_kwargs"]["temperature"] == 1.0
    assert (found["model_name"], found["date"], found["total_evaluation_time_seconds"]) == ("tiny", 100.0, "7.5")
    own = found["gristmill"]
    assert (own["weights"], own["dataset"], own["decides"]) == ("1.20", PLAN.dataset, "accuracy")
    assert own["digest"] == PLAN.digest
    assert own["summary"]["versions"] == {"1.20": 6}
    assert {"python", "gristmill-env", "math-verify", "datasets"} <= own["packages"].keys()


def test_lighteval_skeleton(sums: Evaluated) -> None:
    write_results(sums)
    found = json.loads((sums.folder / METRICS_FILE).read_text())
    assert found["config_general"] == {
        "model_name": "tiny",
        "total_evaluation_time_seconds": "7.5",
        "generation_parameters": {
            "temperature": 1.0, "top_p": 1.0, "do_sample": True, "n": 2, "max_new_tokens": 8, "max_new_tokens_least": 5,
        },
    }  # fmt: skip
    assert found["results"]["all"] == found["results"]["gristmill|sums|0"]
    assert found["results"]["all"]["mean@2"] == 0.5


def test_the_row_for_the_api_holds_numbers_words_and_one_level_of_groups(sums: Evaluated) -> None:
    values = row(sums)
    assert (values["pass@1"], values["prompts"], values["samples"], values["seconds"]) == (0.5, 3, 2, 7.5)
    assert values["errors"] == {"accuracy": 0, "length": 0}
    for value in values.values():
        for one in value.values() if isinstance(value, dict) else [value]:
            assert isinstance(one, int | float | str)


def test_the_tables(sums: Evaluated) -> None:
    console = Console(width=140, file=StringIO())
    show(console, sums)
    text = written(console)
    for part in (
        "model tiny (weights 1.20)",
        "data set 'sums.jsonl' (split test)",
        "2 samples each, temperature 1, top_p 1",
        "accuracy is 1",
        "pass@2",
        "0.6667",
        "maj@2",
        "max_tokens (5 to 8) 0.0%",
        "7.5 s, 1 prompts resumed",
    ):
        assert part in text


def test_an_evaluation_of_nothing_has_files_and_tables_too(tmp_path: Path) -> None:
    nothing = evaluated(tmp_path, [prompt(0, [], skipped="too_long")])
    write_results(nothing)
    assert json.loads((tmp_path / METRICS_FILE).read_text())["results"]["all"] == {}
    console = Console(width=140, file=StringIO())
    show(console, nothing)
    assert "not asked: 1 too_long" in written(console)
