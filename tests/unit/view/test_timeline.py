"""The work and the waits of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.run_folder import CREATED, RunFolderWriter, record_of

import gristmill
from gristmill_view.queries import timeline_of
from gristmill_view.source import Lane, ViewError
from gristmill_view.timeline import MOST_GROUPS, Work, timeline, window

PHASES = {"train": 2.0, "wait": 5.0, "pack": 0.5, "publish": 1.0, "checkpoint": 0.25}


def row(step: int, finished_at: float | None, **seconds: float) -> dict[str, Any]:
    return {"step": step, "finished_at": finished_at, "seconds": seconds or PHASES}


def spans(lane: Lane) -> list[tuple[str, float, float]]:
    return [(span["what"], span["start"], span["end"]) for span in lane["spans"]]


def test_step_begins_where_the_step_before_ended_and_its_phases_end_with_it() -> None:
    times = window([row(1, 1000.0), row(2, 1009.0)], 2)
    assert (times.start, times.end) == (1000.0, 1009.0)
    (lane,) = timeline(times, [])["lanes"]
    assert spans(lane) == [
        ("checkpoint", 0.25, 0.5),
        ("publish", 0.5, 1.5),
        ("wait", 1.5, 6.5),
        ("pack", 6.5, 7.0),
        ("train", 7.0, 9.0),
    ]
    assert lane["waited"] == 5.0


@pytest.mark.parametrize("before", [[], [row(1, 500.0)], [row(1, None)], [row(1, 1008.0)]])
def test_step_after_a_pause_begins_with_its_phases(before: list[dict[str, Any]]) -> None:
    assert window([*before, row(2, 1009.0)], 2).start == 1009.0 - 8.75


@pytest.mark.parametrize("found", [row(2, None), row(2, 1009.0, wait=0.0), row(2, 1009.0, wait=1e300), row(3, 1009.0)])
def test_step_without_times_is_an_error(found: dict[str, Any]) -> None:
    with raises(ViewError, "timeline_missing"):
        window([found], 2)


def test_environment_waits_while_it_has_no_group_in_work() -> None:
    times = window([row(2, 1008.75)], 2)
    works = [Work("a", "env-1", 999.0, 1002.0), Work("b", "env-1", 1001.0, 1003.0), Work("c", "env-1", 1006.0, 1020.0)]
    lanes = timeline(times, [*works, Work("d", "env-2", 1000.0, 1008.75)])["lanes"]
    assert [lane["name"] for lane in lanes] == ["trainer", "env-1", "env-2"]
    assert spans(lanes[1]) == [("work", 0.0, 3.0), ("wait", 3.0, 6.0), ("work", 6.0, 8.75)]
    assert (lanes[1]["waited"], lanes[2]["waited"]) == (3.0, 0.0)
    assert [(one["what"], one["row"]) for one in lanes[1]["groups"]] == [("a", 0), ("b", 1), ("c", 0)]


def test_timeline_of_many_groups_is_bounded_and_says_so() -> None:
    works = [Work(f"g{number}", "env-1", 1000.0, 1001.0) for number in range(MOST_GROUPS + 1)]
    found = timeline(window([row(2, 1008.75)], 2), works)
    assert found["complete"] is False
    assert len(found["lanes"][1]["groups"]) == 24
    assert len(json.dumps(found)) < 10_000


@pytest.mark.slow
def test_timeline_of_a_run_has_its_trained_and_its_dropped_groups(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    end = CREATED / 1000 + 100
    run.metrics([row(1, end)])
    made = make_group("g00000000", version="1.0")
    meta = {"submitted_ms": round((end - 4) * 1000), "seconds": 2.0}
    group = gristmill.TrajectoryGroup(**{**vars(made), "meta": meta})
    run.trained(record_of(group, 1))
    run.archive(group)
    (run.path / "dropped").mkdir()
    kept = {"run": "test", "group_id": "g00000001", "creation_ms": CREATED, "prompt": "1?", "completions": []}
    kept["seconds"] = 1.0
    (run.path / "dropped" / "same_scores.jsonl").write_text(json.dumps(kept) + "\n")
    run.drop("dropped", "g00000001", "g00000002", reason="same_scores", time_ms=round((end - 3) * 1000))
    found = timeline_of((tmp_path,), "test", 1)
    assert found["start_ms"] == round((end - 8.75) * 1000)
    groups = [one for lane in found["lanes"][1:] for one in lane["groups"]]
    assert sorted((one["what"], round(one["start"], 2), round(one["end"], 2)) for one in groups) == [
        ("g00000000", 2.75, 4.75),
        ("g00000001", 4.75, 5.75),
    ]
