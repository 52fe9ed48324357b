"""The completions of a report, read from the archive without the table of rollouts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.support.groups import make_group
from tests.support.run_folder import CREATED, RunFolderWriter, record_of
from tests.unit.view.recorded import record

import gristmill
from gristmill.archive.run_file import write_run_file
from gristmill.folders import RunFolder
from gristmill_view.highlights import highlights


@pytest.fixture
def run(tmp_path: Path) -> RunFolderWriter:
    run = RunFolderWriter(tmp_path)
    run.tokenizer()
    return run


def group(number: int, rewards: list[float], step: int = 0) -> gristmill.TrajectoryGroup:
    return make_group(f"g{number:08d}", lengths=((3, 9), (3, 9)), rewards=rewards, version=f"1.{step}", seed=number)


def found(run: RunFolderWriter, *steps: int) -> list[Any]:
    return [
        (one["step"], [(row["group_id"], row["sequence"], row["reward"]) for row in one["rows"]])
        for one in highlights(RunFolder.open(run.path), steps)
    ]


def test_best_and_worst_completion_of_each_step_have_their_texts(run: RunFolderWriter) -> None:
    groups = [group(0, [0.5, 0.25]), group(1, [0.75, 0.5]), group(2, [1.0, 1.0]), group(3, [0.0, 9.0])]
    run.trained(*(record_of(one, step) for one, step in zip(groups, (1, 1, 2, 3), strict=True)))
    run.archive(*groups)
    assert found(run, 1, 2, 7) == [(1, [("g00000001", 0, 0.75), ("g00000000", 1, 0.25)]), (2, [("g00000002", 0, 1.0)])]
    best = highlights(RunFolder.open(run.path), [1])[0]["rows"][0]
    tokens = groups[1].tokens[: int(groups[1].lengths[0])]
    assert best["prompt"] == " ".join(f"t{token}" for token in tokens[:3])
    assert best["completion"] == " ".join(f"t{token}" for token in tokens[3:])
    assert best["reward_parts"] == {"length": pytest.approx(0.75)}
    assert {path.name for path in run.path.iterdir()} == {"rollouts", "trained"}, "no table is made"


def test_highlight_has_an_extracted_answer_only_if_the_environment_searched_for_it(run: RunFolderWriter) -> None:
    metas: list[dict[str, Any]] = [{}, {"extracted": ["4", None]}]
    groups = [dataclasses.replace(group(n, [1.0, 0.0]), meta=meta) for n, meta in enumerate(metas)]
    run.trained(*(record_of(one, step) for step, one in enumerate(groups, 1)))
    run.archive(*groups)
    without, with_one = highlights(RunFolder.open(run.path), [1, 2])
    assert ["extracted" in row for row in without["rows"]] == [False, False]
    assert [row["extracted"] for row in with_one["rows"]] == ["4", None]


def test_last_record_of_a_group_gives_its_step(run: RunFolderWriter) -> None:
    one = group(0, [1.0, 0.0])
    run.trained(record_of(one, 1), record_of(one, 2))
    run.archive(one)
    assert found(run, 1) == []
    assert [step for step, _ in found(run, 1, 2)] == [2]


def test_groups_of_an_earlier_creation_do_not_count(run: RunFolderWriter, tmp_path: Path) -> None:
    older, newer = group(0, [9.0, 8.0]), group(0, [0.5, 0.25])
    run.trained(record_of(older, 1))
    run.archive(older)
    again = RunFolderWriter(tmp_path, created_ms=CREATED + 5)
    again.trained(record_of(newer, 1))
    again.archive(newer)
    assert found(again, 1) == [(1, [("g00000000", 0, 0.5), ("g00000000", 1, 0.25)])]


@pytest.mark.parametrize(("max_staleness", "steps"), [(0, [1, 2]), (1, [])])
def test_without_records_the_weights_of_a_synchronous_run_give_the_step(
    run: RunFolderWriter, max_staleness: int, steps: list[int]
) -> None:
    for path in (run.path / "trained").glob("*.gmz"):
        path.unlink()
    write_run_file(run.path, record(run_id="test", max_staleness=max_staleness, created_at=CREATED / 1000))
    run.archive(group(0, [1.0, 0.0], step=0), group(1, [1.0, 0.0], step=1))
    assert [step for step, _ in found(run, 1, 2)] == steps


def test_damaged_segment_leaves_the_other_groups(run: RunFolderWriter) -> None:
    one, two = group(0, [1.0, 0.0]), group(1, [2.0, 0.5])
    run.trained(record_of(one, 1), record_of(two, 1))
    run.archive(one)
    (segment,) = (run.path / "rollouts").glob("*.gmz")
    whole = segment.read_bytes()
    run.archive(two)
    content = bytearray(segment.read_bytes())
    content[len(whole) + 30] ^= 255
    segment.write_bytes(content + b"more")
    assert found(run, 1) == [(1, [("g00000000", 0, 1.0), ("g00000000", 1, 0.0)])]


def test_run_without_an_archive_has_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert highlights(RunFolder.open(tmp_path / "empty"), [1]) == []
