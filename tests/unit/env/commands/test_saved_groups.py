"""Saved groups on disk: every written group is kept, and a torn group is never read."""

from __future__ import annotations

import math
import multiprocessing
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.run_folder import CREATED, RunFolderWriter

from gristmill import SamplingParams
from gristmill_env.errors import SavedError
from gristmill_env.saved import GroupWriter, read_groups, set_other_groups_aside
from gristmill_env.saved.group import json_columns

from .conftest import completion, group, save


def test_saved_groups_are_read_back(tmp_path: Path) -> None:
    whole = group(
        completion(
            "2\u2028\x00", 1.0, token_ids=[5, 6], logprobs=[-0.25, -1e-7], scores={"accuracy": 1.0, "mcq": None}
        ),
        completion("", None, finish_reason="length", error="accuracy: ValueError: no"),
        columns={"question": "1 + 1?", "level": {"n": [1, None]}},
        columns_left_out=["image"],
        sampling=SamplingParams(temperature=0.7, top_p=0.9, max_tokens=8),
        settings={"dataset": {"seed": 1}},
        versions=["1.0", "1.1"],
        time=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    )
    assert list(read_groups(save(tmp_path / "new" / "groups.jsonl", [whole, group(row=1)]))) == [whole, group(row=1)]


def test_columns_that_a_file_cannot_hold_unchanged_are_left_out_by_name() -> None:
    kept = {"text": "a", "deep": {"n": [1, None, 0.5, True]}, "large": 2**63}
    left_out = {
        "nan": math.nan, "deep_nan": {"n": [math.inf]}, "huge": 2**64, "low": [-(2**63) - 1], "bytes": b"a",
        "date": datetime(2026, 1, 1, tzinfo=UTC), "decimal": Decimal(1), "keys": {1: "a"},
    }  # fmt: skip
    assert json_columns(kept | left_out) == (kept, list(left_out))


def test_saved_groups_report_and_replace_a_torn_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path / "groups.jsonl", [group(row=0), group(row=1)])
    whole = path.read_bytes()
    for end in range(len(whole) // 2 + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert [one.row for one in read_groups(path)] == [0]
        assert [record.args for record in caplog.records] == [(2, path)]
        caplog.clear()
        save(path, [group(row=2)])
        assert [one.row for one in read_groups(path)] == [0, 2]


def test_saved_groups_keep_a_whole_last_line_without_a_newline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path / "groups.jsonl", [group(row=0), group(row=1)])
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert [one.row for one in read_groups(path)] == [0, 1]
    save(path, [group(row=2)])
    assert [one.row for one in read_groups(path)] == [0, 1, 2]
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        (b"", None),
        (b'{"creation": "now"}\n', None),
        (b'{"creation": "before-this"}\n', "groups-of-before-t-2.jsonl"),
        (b'{"creation": null}\n', "groups-of-unknown.jsonl"),
        (b'{"run": "sums"}\n', "groups-of-unknown.jsonl"),
        (b"torn {", "groups-of-unknown.jsonl"),
    ],
)
def test_saved_groups_of_another_training_are_set_aside(tmp_path: Path, lines: bytes, kept: str | None) -> None:
    path, taken = tmp_path / "groups.jsonl", tmp_path / "groups-of-before-t.jsonl"
    path.write_bytes(lines)
    taken.touch()
    set_other_groups_aside(path, "now")
    assert path.exists() == (kept is None)
    assert [(tmp_path / name).read_bytes() for name in ([kept] if kept else [])] == ([lines] if kept else [])
    set_other_groups_aside(tmp_path / "none.jsonl", "now")


def test_only_the_newest_training_of_a_runs_folder_is_read(tmp_path: Path) -> None:
    for created_ms, rows in ((CREATED, (0, 1)), (CREATED + 5, (0,))):
        run = RunFolderWriter(tmp_path, created_ms=created_ms)
        run.archive(*(make_group(f"g{row:08d}") for row in rows))
    assert [one.row for one in read_groups(run.path, lambda ids, special: "")] == [0]


def test_saved_groups_name_a_last_line_that_is_not_a_group(tmp_path: Path) -> None:
    path = save(tmp_path / "groups.jsonl", [group()])
    path.write_bytes(path.read_bytes() + b'{"answer": 1}')
    with raises(SavedError, "not_a_saved_group", where=f"line 2 of {path}"):
        list(read_groups(path))


def test_a_line_torn_by_another_process_is_cut_off_by_a_writer_that_was_open_before(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    with GroupWriter(path) as writer:
        writer.append(group(row=0))
        with path.open("ab") as other:
            other.write(b'{"format": 1, "run"')
        writer.append(group(row=1))
    assert [one.row for one in read_groups(path)] == [0, 1]


def _write(path: Path, first: int) -> None:
    with GroupWriter(path) as writer:
        for row in range(first, first + 50):
            writer.append(group(completion("x" * 9000, 1.0), row=row))


def test_saved_groups_of_several_processes_go_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, first)) for first in (0, 50, 100)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert sorted(one.row or 0 for one in read_groups(path)) == list(range(150))


@pytest.mark.parametrize(
    ("line", "code", "values"),
    [
        (b"nonsense", "not_a_saved_group", {}),
        (b'{"answer": 1}', "not_a_saved_group", {}),
        (b'{"format": 2, "completions": []}', "group_format", {"format": 2}),
        (b'{"format": 1, "run": "a", "prompt": "b", "completions": [{"text": 3}]}', "not_a_saved_group", {}),
    ],
)
def test_saved_groups_name_a_damaged_line_in_the_middle(
    tmp_path: Path, line: bytes, code: str, values: dict[str, object]
) -> None:
    path = save(tmp_path / "groups.jsonl", [group()])
    path.write_bytes(path.read_bytes() + line + b"\n" + path.read_bytes())
    with raises(SavedError, code, where=f"line 2 of {path}", **values):
        list(read_groups(path))


def test_saved_groups_ignore_keys_of_a_newer_gristmill(tmp_path: Path) -> None:
    path = save(tmp_path / "groups.jsonl", [group()])
    path.write_bytes(path.read_bytes().replace(b'{"format":1', b'{"format":1,"mood":"good"'))
    assert [one.prompt for one in read_groups(path)] == ["1 + 1?"]


def test_saved_groups_report_unusable_paths(tmp_path: Path) -> None:
    with raises(SavedError, "saved_groups_unreadable", path=tmp_path / "gone.jsonl"):
        list(read_groups(tmp_path / "gone.jsonl"))
    with raises(SavedError, "output_unwritable", path=tmp_path):
        GroupWriter(tmp_path)
    (tmp_path / "file").touch()
    with raises(SavedError, "output_unwritable", path=tmp_path / "file" / "groups.jsonl"):
        GroupWriter(tmp_path / "file" / "groups.jsonl")
