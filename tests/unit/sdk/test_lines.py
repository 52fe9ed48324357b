"""Reading a growing file again gives the same as reading it whole, whatever happened to it meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.internal import lines as lines_module
from gristmill.internal.lines import read_growing_jsonl, read_jsonl


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": step / 8}) + "\n" for step in steps)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", lines(1)),
        (lines(1, 2), lines(1, 2, 3)),
        (lines(1, 2), lines(1, 2)),
        (lines(1) + '{"step": 2', lines(1, 2, 3)),
        (lines(1, 2, 3), lines(1, 2)),
        (lines(1, 2, 3), lines(4, 5, 6)),  # another file with the same inode and size
        (lines(1, 2), ""),
        (lines(1), lines(1) + '{"step": 2, "loss": Infinity}\n'),
    ],
)
def test_file_that_changed_is_read_as_if_for_the_first_time(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    assert read_growing_jsonl(path) == read_jsonl(path)
    path.write_text(after)
    assert read_growing_jsonl(path) == read_jsonl(path)


def test_line_with_half_of_a_surrogate_pair_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1) + '{"step": 2, "text": "\\ud83d"}\n{"step": 3, "text": "\\ud83d\\ude00"}\n')
    assert [row["step"] for row in read_jsonl(path)] == [1, 3]


def test_file_that_was_replaced_is_read_whole(tmp_path: Path) -> None:
    """A resumed trainer writes the rows that it keeps to a new file."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2, 3))
    read_growing_jsonl(path)
    other = tmp_path / "metrics.tmp"
    other.write_text(lines(1, 2) + '{"step": 3, "loss": 9.0}\n' + lines(4))
    other.replace(path)
    assert [row["loss"] for row in read_growing_jsonl(path)] == [0.125, 0.25, 9.0, 0.5]


def test_only_new_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(*range(1, 1001)))
    first = read_growing_jsonl(path)
    decoded: list[bytes] = []

    def decode(line: bytes) -> Any:
        decoded.append(line)
        return json.loads(line)

    monkeypatch.setattr(lines_module, "decode_line", decode)
    with path.open("a") as file:
        file.write(lines(1001))
    assert [row["step"] for row in read_growing_jsonl(path)] == list(range(1, 1002))
    assert len(decoded) == 1
    assert len(first) == 1000, "an answer does not grow"
