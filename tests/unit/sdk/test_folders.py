"""The folders of runs: which folders are runs, their order, and files in several roots."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.view.recorded import record, rows, write_run

from gristmill.archive.run_file import write_run_file
from gristmill.folders import RunFolder, list_runs


def age(folder: Path, seconds: int) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (seconds, seconds))


def test_list_runs_names_runs_only_the_latest_first(tmp_path: Path) -> None:
    write_run(tmp_path / "older", rows())
    write_run(tmp_path / "newer", rows())
    age(tmp_path / "older", 1000)
    age(tmp_path / "newer", 2000)
    (tmp_path / "other" / "something").mkdir(parents=True)
    assert [run.run_id for run in list_runs([tmp_path, tmp_path / "missing"])] == ["newer", "older"]


def test_run_in_two_roots_is_listed_once_and_its_newest_file_counts(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / "trainer" / name, rows())
    age(tmp_path / "trainer" / "first", 1000)
    age(tmp_path / "trainer" / "second", 2000)
    write_run_file(tmp_path / "api" / "first", record())
    roots = (tmp_path / "api", tmp_path / "trainer")
    assert list_runs(roots) == [RunFolder("first", roots), RunFolder("second", roots)]


@pytest.mark.parametrize("trace", ["run.json", "model", "drops.jsonl", "checkpoints", "trained"])
def test_folder_with_a_trace_of_a_run_is_a_run(tmp_path: Path, trace: str) -> None:
    (tmp_path / "run" / trace).mkdir(parents=True)
    assert [run.run_id for run in list_runs([tmp_path])] == ["run"]
