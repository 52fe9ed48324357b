"""Saved groups on disk: every written group is kept, and a torn group is never read."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.rollouts import Said, rollout_of
from tests.support.run_folder import CREATED, RunFolderWriter

from gristmill import Permit, RunRecord, RunState, SamplingParams
from gristmill.archive.dropped import DroppedContents
from gristmill.archive.drops import Drop
from gristmill.internal.redaction import remember
from gristmill_env.data import Item, assistant, user
from gristmill_env.errors import DropReason, EpisodeError, SavedError
from gristmill_env.inference import Completion
from gristmill_env.inference.types import LabelSpan
from gristmill_env.rewards import Failure, Score
from gristmill_env.rollouts.prompts import Prompt
from gristmill_env.saved import Attempt, DroppedSaver, GroupWriter, read_groups, set_other_groups_aside
from gristmill_env.saved.group import json_columns
from gristmill_env.settings.run import EnvConfig

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


# --- Dropped groups --------------------------------------------------------------------------------------------
RECORD = RunRecord(
    run_id="sums", state=RunState.OPEN, digest="", group_size=2, env={}, created_at=CREATED / 1000, creation="c"
)
DROPPED_ITEM = Item(5, 2, "1 / 0?", "no", {"question": "1 / 0?", "when": datetime(2026, 1, 2, tzinfo=UTC)})


def drop(folder: Path, number: int, text: str, max_bytes: int, rollouts: int = 2, scored: bool = True) -> None:
    failure = Failure("judge", "KeyError: board", "reward_raised")
    scores = (
        [Score(None, {"judge": None}, str(failure), {"judge": failure}), Score(0.5, {"judge": 0.5})] if scored else []
    )
    reply = Said(Completion([1, 2], [-0.1, -0.2], "stop", [LabelSpan("1.3", 0, 2)]), "")
    rollout = rollout_of(Prompt("<1 / 0?>", (7, 8), (user("1 / 0?"),)), reply)
    played = [replace(rollout, text=text, messages=(user("1 / 0?"), assistant(text)))] * rollouts
    failed = [EpisodeError("environment_raised", "Game.step: no board for hunter2-of-the-judge")]
    attempt = Attempt(2, DROPPED_ITEM, SamplingParams(temperature=1.0, max_tokens=4), played, scores, failed, 1.5)
    saver = DroppedSaver(folder, RECORD, "env-1", model="tiny", config=EnvConfig(), max_bytes=max_bytes)
    permit = Permit(group_id=f"g{number:08d}", row=number)
    asyncio.run(saver.save(permit, DropReason.REWARD_ERROR, "judge: KeyError: board", attempt))


def test_dropped_group_is_saved_with_all_that_replay_and_the_table_need(tmp_path: Path) -> None:
    remember("hunter2-of-the-judge")
    drop(tmp_path, 5, "half \ud800 of hunter2-of-the-judge", 1 << 20)
    drop(tmp_path, 6, "unscored", 1 << 20, scored=False)
    file = tmp_path / "dropped" / "reward_error.jsonl"
    first, second = read_groups(file)
    assert [one.text for one in first.completions] == ["half \ufffd of ***"] * 2
    assert [(one.total, one.scores, one.errors) for one in first.completions] == [
        (None, {"judge": None}, {"judge": "KeyError: board"}),
        (0.5, {"judge": 0.5}, {}),
    ]
    assert (first.row, first.index, first.prompt, first.answer, first.versions) == (5, 2, "1 / 0?", "no", ["1.3"])
    assert (first.columns, first.columns_left_out) == ({"question": "1 / 0?"}, ["when"])
    assert [(one.text, one.total) for one in second.completions] == [("unscored", None)] * 2
    assert first.failed == [{"error": "environment_raised", "text": "Game.step: no board for ***"}]
    found = DroppedContents([tmp_path.resolve()]).of(fate(5))
    assert found is not None
    facts = (found.index, found.error, found.prompt_text, found.prompt_tokens, found.seconds, found.env_id)
    assert facts == (2, "judge: KeyError: board", "<1 / 0?>", 2, 1.5, "env-1")
    assert [one.why for one in found.completions] == ["judge: KeyError: board", None]


@pytest.mark.slow
def test_dropped_groups_take_a_bounded_place_and_the_newest_are_kept(tmp_path: Path) -> None:
    bound = 40_000
    for number in range(40):
        drop(tmp_path, number, "x" * 900, bound)
    drop(tmp_path, 40, "y" * 3000, bound, rollouts=8, scored=False)
    drop(tmp_path, 41, "z" * 20_000, bound)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "dropped").glob("*.jsonl")}
    assert sizes.keys() == {"reward_error.jsonl", "reward_error.1.jsonl"}
    assert max(sizes.values()) <= bound
    contents = DroppedContents([tmp_path.resolve()])
    kept = [number for number in range(42) if contents.of(fate(number)) is not None]
    assert kept == list(range(kept[0], 42))
    assert 10 < len(kept) < 30
    many, long = contents.of(fate(40)), contents.of(fate(41))
    assert many is not None
    assert [one.text for one in many.completions] == ["y" * 3000] * 2, "texts are whole, and the others left out"
    assert long is not None
    assert (long.completions, long.prompt, long.error) == ([], "1 / 0?", "judge: KeyError: board")


@pytest.mark.slow
def test_dropped_groups_of_several_writers_never_mix(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: drop(tmp_path, number, "x" * 100, 60_000), range(40)))
    contents = DroppedContents([tmp_path.resolve()])
    assert [number for number in range(40) if contents.of(fate(number)) is None] == [], "40 groups fit in two files"


def fate(number: int) -> Drop:
    group = f"g{number:08d}"
    return Drop(creation=CREATED, group_id=group, row=number, what="dropped", reason="reward_error", time_ms=1)


def test_columns_that_a_file_cannot_hold_unchanged_are_left_out_by_name() -> None:
    kept = {"text": "a", "deep": {"n": [1, None, 0.5, True]}, "large": 2**63}
    left_out = {
        "nan": math.nan, "deep_nan": {"n": [math.inf]}, "huge": 2**64, "low": [-(2**63) - 1], "bytes": b"a",
        "date": datetime(2026, 1, 1, tzinfo=UTC), "decimal": Decimal(1), "keys": {1: "a"},
    }  # fmt: skip
    assert json_columns(kept | left_out) == (kept, list(left_out))


@pytest.mark.slow
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


@pytest.mark.timeout(20)
def test_a_device_and_a_fifo_are_not_read_for_groups_of_another_training(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        set_other_groups_aside(path, "now")
        assert path.exists()


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


@pytest.mark.slow
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
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", "not_a_saved_group", {}),
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
