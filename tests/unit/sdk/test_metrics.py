"""The metrics file survives kills and resumes."""

from __future__ import annotations

from pathlib import Path

from gristmill.internal.lines import JsonlWriter, read_jsonl


def test_rows_that_a_resumed_trainer_repeats_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        for step in (1, 2, 3):
            writer.append({"step": step})
    with JsonlWriter(path, keep=lambda row: row["step"] <= 2) as writer:
        writer.append({"step": 3, "again": True})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_metrics_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_jsonl(path) == [{"step": 1}]
    JsonlWriter(path).append({"step": 2})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_line_separator_in_a_text_does_not_end_a_metrics_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.append({"text": "one\u2028two\x85three"})
    assert read_jsonl(path) == [{"text": "one\u2028two\x85three"}]
