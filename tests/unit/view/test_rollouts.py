"""The table of rollouts: rows of all outcomes, updates that read only new data, and the gaps that the table reports."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.run_folder import CREATED, RunFolderWriter, record_of
from tests.unit.view.recorded import record

import gristmill
from gristmill.archive.drops import Drop, append_drops
from gristmill.archive.run_file import write_run_file
from gristmill.archive.trained import TrainedGroup, TrainedSequence
from gristmill.folders import RunFolder, RunMissingError, list_runs
from gristmill.group import NO_LOGPROBS
from gristmill_cli.main import main
from gristmill_view import dataset, rollouts, sql
from gristmill_view.rollouts import SCHEMA, Completeness, SqlError, build
from gristmill_view.rows import read_submitted


def groups(*ids: str) -> list[gristmill.TrajectoryGroup]:
    return [make_group(one, seed=int(one[1:]), lengths=((3, 12), (3, 9))) for one in ids]


def rows(run: RunFolderWriter, where: str = "true") -> list[dict[str, Any]]:
    query = f"SELECT * FROM rollouts WHERE {where} ORDER BY group_id, sequence"
    found: list[dict[str, Any]] = sql(run.path, query).to_pylist()
    return found


def counts(found: Completeness) -> dict[str, int]:
    names = ("trained", "lost", "dropped", "dead", "leased", "evaluations", "rows", "without_record", "unaccounted")
    return {name: getattr(found, name) for name in names if getattr(found, name)}


def test_trained_group_has_a_row_per_completion_with_both_log_probabilities(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    run.tokenizer()
    (group,) = groups("g00000000")
    record = record_of(group, step=1)
    run.trained(record)
    run.archive(group)
    found = rows(run)
    assert [row["sequence"] for row in found] == [0, 1]
    start = 0
    for index, row in enumerate(found):
        piece = slice(start, start := start + int(group.lengths[index]))
        sequence = record.sequences[index]
        assert row["tokens"] == group.tokens[piece].tolist()
        assert row["mask"] == group.mask[piece].tolist()
        np.testing.assert_array_equal(np.array(row["sampler_logprobs"], np.float32), group.logprobs[piece])
        of_trainer = np.array(row["trainer_logprobs"], np.float32)
        np.testing.assert_array_equal(of_trainer[sequence.mask], sequence.logprobs)
        assert not of_trainer[~sequence.mask].any()
        np.testing.assert_array_equal(np.array(row["entropy"], np.float32)[sequence.mask], sequence.entropy)
        assert row["advantage"] == pytest.approx(float(sequence.advantages[0]), rel=1e-6)
        assert row["advantages"] is None
        ratio = np.exp(sequence.logprobs.astype(float) - group.logprobs[piece][sequence.mask])  # type: ignore[union-attr]
        assert row["ratio"] == pytest.approx(ratio.mean(), rel=1e-5)
        assert row["ratio_max"] == pytest.approx(ratio.max(), rel=1e-5)
        assert row["prompt"] == " ".join(f"t{token}" for token in group.tokens[piece][:3])
        assert row["completion"] == " ".join(f"t{token}" for token in group.tokens[piece][3:])
        assert (row["prompt_tokens"], row["completion_tokens"]) == (3, len(sequence.mask) - 3)
        assert (row["reward"], dict(row["reward_parts"])) == (
            pytest.approx(float(group.rewards[index])),
            {"length": pytest.approx(float(group.rewards[index]))},
        )
        facts = ("run", "creation", "step", "row", "staleness", "turns", "finish_reason", "outcome", "acked")
        assert [row[name] for name in facts] == ["test", CREATED, 1, 0, 0, 1, "stop", "trained", True]
    assert pq.read_schema(next((run.path / "dataset").glob("part-*.parquet"))).metadata == SCHEMA.metadata


def test_archived_group_names_its_source(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    sums, plain, wrong = groups("g00000000", "g00000001", "g00000002")
    run.archive(*(replace(group, meta=meta) for group, meta in ((sums, {"source": "sums"}), (wrong, {"source": 3}))))
    run.archive(plain)
    found = {row["group_id"]: row["source"] for row in rows(run)}
    assert found == {"g00000000": "sums", "g00000001": None, "g00000002": None}


def test_sequences_that_the_trainer_left_out_say_why(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    kept, whole = groups("g00000000", "g00000001")
    record = record_of(kept, step=1)
    nothing = np.zeros(0, np.float32)
    left_out = TrainedSequence("logprobs", np.zeros(0, np.bool_), None, nothing, None)
    sequences = {0: record.sequences[0], 1: left_out}
    run.trained(TrainedGroup(kept.group_id, 1, "1.1", None, sequences))
    run.trained(TrainedGroup(whole.group_id, 1, "1.1", "stale", {}))
    run.archive(kept, whole)
    assert [(row["outcome"], row["outcome_reason"], row["acked"], row["advantage"] is None) for row in rows(run)] == [
        ("trained", None, True, False),
        ("dropped", "logprobs", True, True),
        ("dropped", "stale", True, True),
        ("dropped", "stale", True, True),
    ]


def test_rows_number_rollouts_and_their_branches(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    branches = make_group("g00000001", lengths=[(3, 2)] * 4, rewards=[1, 1, 0, 0], rollouts=[0, 0, 1, 1])
    run.archive(*groups("g00000000"), branches)
    columns = ("group_id", "sequence", "rollout", "branch")
    assert [tuple(row[name] for name in columns) for row in rows(run)] == [
        ("g00000000", 0, 0, 0),
        ("g00000000", 1, 1, 0),
        ("g00000001", 0, 0, 0),
        ("g00000001", 1, 0, 1),
        ("g00000001", 2, 1, 0),
        ("g00000001", 3, 1, 1),
    ]


def test_rollouts_that_were_left_out_of_a_trained_group_have_rows(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    failed = [{"error": "agent_timeout", "text": "the agent took more than 900 s"}, "odd", {"error": 3}]
    sums, odd, many = groups("g00000000", "g00000001", "g00000002")
    run.archive(replace(sums, meta={"failed": failed, "index": 7}), replace(odd, meta={"failed": "odd"}))
    run.archive(replace(many, meta={"failed": [{}] * 5000}))
    left_out = [row for row in rows(run) if row["outcome"] == "left_out"]
    assert Counter(row["group_id"] for row in left_out) == {"g00000000": 2, "g00000002": 1024}
    found = left_out[:2]
    columns = ("group_id", "rollout", "sequence", "index", "outcome_reason", "error", "acked", "reward", "tokens")
    assert [tuple(row[name] for name in columns) for row in found] == [
        ("g00000000", 2, None, 7, "agent_timeout", "the agent took more than 900 s", True, None, None),
        ("g00000000", 3, None, 7, None, None, True, None, None),
    ]


def test_advantages_that_differ_by_token_are_kept_for_each_token(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    (group,) = groups("g00000000")
    record = record_of(group, step=1)
    several = np.arange(12, dtype=np.float32)
    first = record.sequences[0]
    changed = TrainedSequence("trained", first.mask, first.logprobs, several, None)
    run.trained(TrainedGroup(group.group_id, 1, "1.1", None, {**record.sequences, 0: changed}))
    run.archive(group)
    found = rows(run)[0]
    assert found["advantages"] == [0.0] * 3 + several.tolist()
    assert found["advantage"] == pytest.approx(5.5)
    assert found["entropy"] is None


def test_groups_without_content_have_rows_that_say_what_became_of_them(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    run.drop("dropped", "g00000000", reason="same_scores")
    run.drop("dead", "g00000001", "g00000002", "g00000003", reason="undeliverable")
    run.drop("replayed", "g00000002", reason="replayed")
    run.drop("dropped", "g00000003", reason="purged")
    run.drop("let_go", "g00000004", reason="disk")
    (group,) = groups("g00000005")
    run.trained(record_of(group, step=3))
    columns = ("group_id", "sequence", "outcome", "outcome_reason", "acked", "step", "tokens")
    assert [tuple(row[name] for name in columns) for row in rows(run)] == [
        ("g00000000", None, "dropped", "same_scores", False, None, None),
        ("g00000001", None, "dead", "undeliverable", False, None, None),
        ("g00000003", None, "dropped", "purged", False, None, None),
        ("g00000004", None, "lost", "disk", True, None, None),
        ("g00000005", 0, "leased", None, False, 3, None),
        ("g00000005", 1, "leased", None, False, 3, None),
    ]
    expected = {"lost": 1, "dropped": 2, "dead": 1, "leased": 1, "rows": 6, "without_record": 1, "unaccounted": 1}
    assert counts(build(run.path)) == expected


def content(group_id: str, *completions: dict[str, Any], **fields: Any) -> bytes:
    """A line of the environment's files of dropped groups."""
    line = {"group_id": group_id, "creation_ms": CREATED, "format": 1, "run": "test", "prompt": "1 / 0?", "index": 41}
    line |= {"prompt_text": "<user>1 / 0?", "messages": [{"role": "user", "content": "1 / 0?"}], "answer": "no"}
    line |= {"versions": ["1.10", "1.9"], "sampling": {"temperature": 1.0, "max_tokens": 8}, "error": "of the group"}
    return json.dumps(line | {"completions": completions} | fields).encode() + b"\n"


@pytest.mark.slow
def test_dropped_groups_have_the_content_that_the_environment_kept(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    folder = run.path / "dropped"
    folder.mkdir()
    failed = {
        "text": "a",
        "tokens": 3,
        "scores": {"near": None, "format": 1.0},
        "errors": {"near": "ZeroDivisionError"},
    }
    scored = {"text": "", "tokens": 0, "scores": {"near": 0.5, "format": 0.0}, "total": 0.5, "finish_reason": "length"}
    turns = [
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": ""},
    ]
    bad = content("g00000001", prompt="", prompt_text=None, messages=None, answer=None, versions=["default"])
    (folder / "reward_error.1.jsonl").write_bytes(content("g00000000", failed, scored))
    (folder / "reward_error.jsonl").write_bytes(
        content("g00000000", scored, creation_ms=CREATED - 1)  # of the training before
        + content("g00000005", {**scored, "messages": turns}, source="sums")
        + b"no JSON\n"
        + content("g00000006", index=1 << 70)  # of a third party
        + content("g00000002", scored)[:-30]  # torn by a kill
    )
    (folder / "bad_row.jsonl").write_bytes(bad + content("g00000003") + content("g00000008"))
    run.drop("dropped", *(f"g0000000{number}" for number in (0, 2, 4, 5, 6)), reason="reward_error")
    run.drop("dropped", "g00000001", reason="bad_row")
    (folder / "timeout.jsonl").symlink_to(folder / "bad_row.jsonl")
    run.drop("dropped", "g00000008", reason="timeout")
    run.drop("dropped", "g00000007", reason="../bad_row")
    run.drop("let_go", "g00000003", reason="disk")
    columns = ("group_id", "sequence", "index", "prompt", "completion", "reward", "error", "answer", "turns")
    assert [tuple(row[name] for name in columns) for row in rows(run)] == [
        ("g00000000", 0, 41, "<user>1 / 0?", "a", None, "near: ZeroDivisionError", "no", 1),
        ("g00000000", 1, 41, "<user>1 / 0?", "", 0.5, None, "no", 1),
        ("g00000001", None, 41, None, None, None, "of the group", None, None),
        ("g00000002", None, None, None, None, None, None, None, None),
        ("g00000003", None, None, None, None, None, None, None, None),
        ("g00000004", None, None, None, None, None, None, None, None),
        ("g00000005", 0, 41, "<user>1 / 0?", "", 0.5, "of the group", "no", 2),
        ("g00000006", None, None, None, None, None, None, None, None),
        ("g00000007", None, None, None, None, None, None, None, None),
        ("g00000008", None, None, None, None, None, None, None, None),
    ]
    assert {row["group_id"]: row["source"] for row in rows(run) if row["source"]} == {"g00000005": "sums"}
    first, second = rows(run, "group_id = 'g00000000'")
    facts = ("version_first", "version_last", "completion_tokens", "finish_reason", "outcome", "acked", "temperature")
    assert [second[name] for name in facts] == ["1.9", "1.10", 0, "length", "dropped", False, 1.0]
    assert (dict(first["reward_parts"]), dict(second["reward_parts"])) == (
        {"format": 1.0},
        {"near": 0.5, "format": 0.0},
    )
    assert json.loads(first["messages"])[-1] == {"role": "assistant", "content": "a"}
    assert build(run.path).dropped == 8


def test_content_that_came_after_an_update_is_found_by_the_next(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    (run.path / "dropped").mkdir(parents=True)
    for number in (0, 1):
        with (run.path / "dropped" / "same_scores.jsonl").open("ab") as file:
            file.write(content(f"g0000000{number}", {"text": str(number)}))
        run.drop("dropped", f"g0000000{number}", reason="same_scores")
        assert [row["completion"] for row in rows(run)] == ["0", "1"][: number + 1]


def test_lost_group_with_a_record_has_a_row_per_sequence(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    (group,) = groups("g00000000")
    run.trained(record_of(group, step=2))
    run.drop("let_go", "g00000000", reason="max_bytes")
    found = rows(run)
    assert [(row["sequence"], row["outcome"], row["step"]) for row in found] == [(0, "lost", 2), (1, "lost", 2)]
    assert all(row["advantage"] is not None for row in found)


@pytest.mark.slow
def test_updates_read_only_what_is_new_and_settle_what_was_open(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    first, second, third = groups("g00000000", "g00000001", "g00000002")
    run.trained(record_of(first, step=1), record_of(second, step=1))
    run.archive(first)
    run.drop("dead", "g00000002", reason="undeliverable")
    assert counts(build(run.path)) == {"trained": 1, "dead": 1, "leased": 1, "rows": 5}
    run.archive(second, third)  # The dead letter was covered by a checkpoint. Its record is late.
    assert counts(build(run.path)) == {"trained": 3, "rows": 6, "without_record": 1}
    run.trained(record_of(third, step=2))
    run.archive(third)  # A crash of the API may write a group twice.
    assert counts(build(run.path)) == {"trained": 3, "rows": 6}
    assert [row["step"] for row in rows(run)] == [1, 1, 1, 1, 2, 2]
    state = (run.path / "dataset" / "state.json").read_bytes()
    assert counts(build(run.path)) == {"trained": 3, "rows": 6}
    changed = (run.path / "dataset" / "state.json").read_bytes()
    assert state.replace(b'"opened":4', b"") == changed.replace(b'"opened":5', b"")


def test_last_record_of_a_group_counts(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    (group,) = groups("g00000000")
    run.trained(record_of(group, step=5, version="1.5"), record_of(group, step=4, version="2.4"))
    run.archive(group)
    assert {row["step"] for row in rows(run)} == {4}


def test_update_after_a_crash_between_part_and_state_gives_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolderWriter(tmp_path)
    run.archive(*groups("g00000000"))
    build(run.path)
    run.archive(*groups("g00000001"))
    with monkeypatch.context() as patch:
        patch.setattr("gristmill_view.rollouts.write_file", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(run.path)
    assert len(dataset(run.path, update=False).to_table()) == 2
    run.archive(*groups("g00000002"))
    assert len(rows(run)) == 6


@pytest.mark.slow
def test_update_after_a_killed_update_reads_only_what_no_part_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolderWriter(tmp_path)
    some = groups(*(f"g{number:08d}" for number in range(8)))
    run.trained(*(record_of(group, step=1) for group in some))
    run.drop("dropped", "g00000008")
    build(run.path)
    run.archive(*some)
    read = Mock(wraps=read_submitted, side_effect=[DEFAULT] * 5 + [KeyboardInterrupt] + [DEFAULT] * 3)
    for name, value in (("read_submitted", read), ("_ROWS_AT_ONCE", 1), ("_PART_BYTES", 1)):
        monkeypatch.setattr(rollouts, name, value)
    with pytest.raises(KeyboardInterrupt):
        build(run.path)
    known = dataset(run.path, update=False).to_table(columns=["group_id", "sequence"]).to_pylist()
    assert len(known) == len({tuple(row.values()) for row in known}) == 1 + 2 * 5
    assert counts(build(run.path)) == {"trained": 8, "dropped": 1, "rows": 17}
    assert read.call_count == 9
    assert [(row["row"], row["step"]) for row in rows(run, "sequence = 0")] == [(number, 1) for number in range(8)]


@pytest.mark.long
@pytest.mark.slow
def test_many_small_updates_leave_few_files(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    for number in range(40):
        run.archive(*groups(f"g{number:08d}"))
        build(run.path)
    assert len(rollouts._files(RunFolder.open(run.path), update=False)) < 20
    assert [row["row"] for row in rows(run, "sequence = 0")] == list(range(40))


def test_dataset_stays_readable_after_an_update_and_its_old_files_are_removed_later(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    run.archive(*groups("g00000000"))
    opened = dataset(run.path)
    part, replaced = map(Path, opened.files)
    os.utime(replaced, (0, 0))
    run.archive(*groups("g00000001"))
    build(run.path)
    assert opened.count_rows() == len(opened.to_table()) == 2
    os.utime(replaced, (0, 0))
    build(run.path)
    assert (part.exists(), replaced.exists()) == (True, False)


def test_table_of_another_schema_version_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolderWriter(tmp_path)
    run.archive(*groups("g00000000"))
    build(run.path)
    monkeypatch.setattr(rollouts, "SCHEMA_VERSION", 99)
    assert counts(build(run.path)) == {"trained": 1, "rows": 2, "without_record": 1}


def test_texts_that_are_not_utf_8_are_unreadable_files(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    (group,) = groups("g00000000")
    run.archive(group)
    build(run.path)
    (run.path / "dataset" / rollouts._STATE).write_bytes(b'{"schema_version": "\xff"}')
    assert build(run.path).trained == 1
    body = record_of(group, step=1).encode().replace(b"g00000000", b"g0000000\xff")
    with raises(gristmill.GristmillError, "not_a_trained_group"):
        TrainedGroup.decode(body)


@pytest.mark.slow
@pytest.mark.parametrize("moved", [False, True])
def test_run_that_was_deleted_and_created_again_has_the_rows_of_both(tmp_path: Path, moved: bool) -> None:
    older = RunFolderWriter(tmp_path)
    older.archive(*groups("g00000000"))
    build(older.path)
    if moved:  # The new run begins with a file of the same name.
        (older.path / "rollouts").rename(tmp_path / "before")
    newer = RunFolderWriter(tmp_path, created_ms=CREATED + 5)
    newer.archive(*groups("g00000000", "g00000001"))
    newer.drop("dropped", "g00000002", reason="stale")
    assert counts(build(newer.path)) == {"trained": 2, "dropped": 1, "rows": 7, "without_record": 2}
    assert [row["creation"] for row in rows(newer)] == [CREATED + 5] * 5
    both = sql(newer.path, "SELECT creation, count(*) AS n FROM all_rollouts GROUP BY 1 ORDER BY 1")
    assert both["n"].to_pylist() == [2, 5]


@pytest.mark.long
@pytest.mark.slow
def test_segments_that_the_archive_removes_are_lost_rows_unless_they_were_read(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path, max_bytes=40_000)
    for number in range(120):
        run.archive(make_group(f"g{number:08d}", lengths=((3, 120), (3, 120)), seed=number))
    found = build(run.path)
    assert (found.trained + found.lost, found.unaccounted) == (120, 0)
    assert found.lost > 60
    assert {row["outcome_reason"] for row in rows(run, "outcome = 'lost'")} == {"max_bytes"}
    for number in range(120, 200):
        run.archive(make_group(f"g{number:08d}", lengths=((3, 120), (3, 120)), seed=number))
        build(run.path)
    assert (build(run.path).lost, build(run.path).trained) == (found.lost, 200 - found.lost)


def test_group_of_an_unknown_schema_is_an_error(tmp_path: Path) -> None:
    """An earlier API archived the JSON of Atropos' clients."""
    run = RunFolderWriter(tmp_path)
    run.archive_json("a00000000", {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0]})
    with raises(gristmill.GristmillError, "archive_schema", schema="atropos"):
        build(run.path)


def test_group_without_logprobs_has_none_in_the_table(tmp_path: Path) -> None:
    """As groups of Atropos' protocol may be."""
    run = RunFolderWriter(tmp_path)
    group = make_group("a00000003", lengths=[(1, 2), (1, 2)])
    silent: dict[str, Any] = {
        "logprobs": np.zeros_like(group.logprobs),
        "meta": {NO_LOGPROBS: True},
        "env_id": "atropos-1",
    }
    run.archive(replace(group, **silent))
    found = rows(run)
    assert [(row["group_id"], row["env_id"], row["sampler_logprobs"]) for row in found] == [
        ("a00000003", "atropos-1", None)
    ] * 2
    assert found[0]["tokens"] == group.tokens[:3].tolist()


@pytest.mark.long
@pytest.mark.slow
def test_group_of_unusual_values_costs_the_other_groups_no_rows(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    odd = {"index": True, "submitted_ms": 1 << 63, "seconds": 1e308, "source": 5, "answer": [], "extracted": [{}, 1]}
    group = make_group("g00000000")
    several = make_group("g00000001", lengths=[(1, 70_000), (3, 4)])
    several.mask[1:70_001:2] = False
    many = make_group("g00000002", lengths=[(1, 1)] * 40_000)
    run.archive(replace(group, meta=odd, reward_parts={"": [1e308, None]}), several, many, make_group("g00000003"))
    run.evaluation("step-000001", "1.1", 1)
    with (run.path / "evaluations" / "step-000001" / "groups.jsonl").open("ab") as file:
        file.write(content("g00000004", row=1 << 63))
    found = rows(run)
    assert [row["sequence"] for row in found if row["group_id"] == "g00000002"] == [*range(40_000)]
    assert {row["group_id"]: row["turns"] for row in found if not row["sequence"]} == {
        "g00000000": 1,
        "g00000001": 35_000,
        "g00000002": 1,
        "g00000003": 1,
        "step-000001/0": 1,
    }
    names = ("index", "submitted_ms", "source", "answer", "extracted")
    assert {row[name] for row in found if row["group_id"] == "g00000000" for name in names} == {None}


def test_evaluation_has_rows_that_are_final_when_it_is_finished(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    run.evaluation("step-000020", "1.20", prompts=3, finished=False)
    assert counts(build(run.path)) == {"evaluations": 3, "rows": 3}
    run.evaluation("step-000020", "1.20", prompts=4)
    assert counts(build(run.path)) == {"evaluations": 4, "rows": 4}
    assert counts(build(run.path)) == {"evaluations": 4, "rows": 4}
    found = rows(run)[0]
    names = ("group_id", "step", "outcome", "extracted", "answer", "reward", "reward_parts", "version_first")
    expected = ["step-000020/0", 20, "evaluation", "4", "4", 1.0, [("accuracy", 1.0)], "1.20"]
    assert [found[name] for name in names] == expected


@pytest.mark.slow
def test_evaluation_of_an_earlier_training_is_not_a_row_of_this_one(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    synchronous(run)
    for name, creation in (("mine", "c2"), ("earlier", "c1"), ("unknown and new", None), ("unknown and old", None)):
        run.evaluation(name, "1.20", prompts=1, creation=creation)
    os.utime(run.path / "evaluations" / "unknown and old" / "evaluation.json", (1, 1))
    write_run_file(run.path, record(run_id="test", created_at=CREATED / 1000, creation="c2"))
    folder = "split_part(group_id, '/', 1) AS folder"
    found = sql(run.path, f"SELECT {folder} FROM rollouts WHERE outcome = 'evaluation' ORDER BY 1")
    assert found["folder"].to_pylist() == ["mine", "unknown and new"]
    every = sql(run.path, "SELECT count(*) AS n FROM all_rollouts WHERE outcome = 'evaluation'")
    assert every["n"].to_pylist() == [4]


def test_repeated_and_garbled_completions_are_measured(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    run.tokenizer()
    group = make_group("g00000000", lengths=((3, 40), (3, 40)))
    tokens = group.tokens.copy()
    tokens[3:43] = 5
    run.archive(gristmill.TrajectoryGroup(**{**vars(group), "tokens": tokens}))
    first, second = rows(run)
    assert first["repeated"] == pytest.approx(36 / 37)
    assert second["repeated"] == pytest.approx(0.0, abs=0.1)
    assert first["garbled"] == 0.0


def test_files_in_several_roots_make_one_table(tmp_path: Path) -> None:
    of_api, of_trainer = RunFolderWriter(tmp_path / "api"), RunFolderWriter(tmp_path / "trainer")
    (group,) = groups("g00000000")
    of_api.archive(group)
    of_trainer.trained(record_of(group, step=7))
    for folder in ((of_trainer.path / "rollouts"), (of_api.path / "trained")):
        folder.rmdir()
    found = sql("test", "SELECT step FROM rollouts", roots=[tmp_path / "api", tmp_path / "trainer"])
    assert found["step"].to_pylist() == [7, 7]
    assert [one.run_id for one in list_runs([tmp_path / "api", tmp_path / "trainer"])] == ["test"]


def test_run_without_a_tokenizer_has_no_texts_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_MODELS_DIR", str(tmp_path))
    run = RunFolderWriter(tmp_path)
    run.archive(*groups("g00000000"))
    with caplog.at_level(logging.WARNING):
        assert rows(run)[0]["completion"] is None
    assert "tokenizer" in caplog.text


@pytest.mark.slow
def test_damaged_segment_is_reported_and_the_others_are_read(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path, max_bytes=40_000)
    for number in range(12):
        run.archive(make_group(f"g{number:08d}", lengths=((3, 120), (3, 120)), seed=number))
    segments = sorted((run.path / "rollouts").glob("*.gmz"))
    content = bytearray(segments[1].read_bytes())
    content[len(content) // 2] ^= 255
    segments[1].write_bytes(content)
    found = build(run.path)
    assert found.damaged == [str(segments[1])]
    assert 0 < found.unaccounted == 12 - found.trained
    assert "00000000" in str(rows(run)[0]["group_id"])
    assert f"g{11:08d}" in {row["group_id"] for row in rows(run)}


def synchronous(run: RunFolderWriter, max_staleness: int = 0, created_ms: int = CREATED) -> None:
    """Writes the run's record."""
    write_run_file(run.path, record(run_id="test", max_staleness=max_staleness, created_at=created_ms / 1000))


def test_step_of_a_synchronous_run_without_records_is_known_from_the_weights(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    synchronous(run)
    run.archive(*(make_group(f"g{n:08d}", version=f"1.{n}", seed=n) for n in range(2)))
    append_drops(run.path, [Drop(creation=CREATED, group_id="g00000002", row=2, what="let_go", step=2, time_ms=1)])
    found = rows(run)
    assert [(row["group_id"], row["step"], row["staleness"], row["outcome"]) for row in found] == [
        ("g00000000", 1, 0, "trained"),
        ("g00000000", 1, 0, "trained"),
        ("g00000001", 2, 0, "trained"),
        ("g00000001", 2, 0, "trained"),
        ("g00000002", 3, None, "lost"),
    ]
    assert build(run.path).without_record == 3


@pytest.mark.parametrize(("max_staleness", "created_ms"), [(1, CREATED), (0, CREATED + 5)])
def test_step_without_a_record_is_unknown_if_the_run_was_ahead_or_is_another(
    tmp_path: Path, max_staleness: int, created_ms: int
) -> None:
    run = RunFolderWriter(tmp_path)
    synchronous(run, max_staleness, created_ms)
    run.archive(*groups("g00000000"))
    found = sql(run.path, "SELECT creation, step FROM all_rollouts").to_pylist()
    assert {(row["creation"], row["step"]) for row in found} == {(CREATED, None)}


def test_conversations_and_the_replies_of_several_turns_are_kept(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    one, several = groups("g00000000", "g00000001")
    mask = several.mask.copy()
    mask[7:9] = False  # The environment's turn in the first sequence.
    logprobs = np.where(mask, several.logprobs, np.float32(0))
    conversation = [{"role": "user", "content": "7?"}, {"role": "assistant", "content": "é"}]
    sent = [conversation, conversation[:1]]
    run.archive(
        one, gristmill.TrajectoryGroup(**{**vars(several), "mask": mask, "logprobs": logprobs, "messages": sent})
    )
    found = rows(run)
    assert [(row["turns"], row["replies"], row["messages"] is None) for row in found] == [
        (1, None, True),
        (1, None, True),
        (2, [3, 7, 9, 15], False),
        (1, None, False),
    ]
    assert [json.loads(row["messages"]) for row in found[2:]] == sent


def test_conversations_that_are_not_one_per_sequence_are_left_out(tmp_path: Path) -> None:
    """Atropos' environments may send the conversations of some sequences only."""
    run = RunFolderWriter(tmp_path)
    whole, part = (make_group(one, lengths=[(1, 1), (1, 1)]) for one in ("a00000000", "a00000001"))
    conversation = [{"role": "assistant", "content": "x"}]
    run.archive(replace(whole, messages=[conversation, []]), replace(part, messages=[conversation]))
    assert [row["messages"] for row in rows(run)] == ['[{"role": "assistant", "content": "x"}]', "[]", None, None]


def test_folder_without_anything_is_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    assert sql(tmp_path / "test", "SELECT * FROM rollouts, steps").num_rows == 0
    assert dataset(tmp_path / "test").schema == SCHEMA


def test_run_that_does_not_exist_and_names_outside_the_roots_are_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("missing", "..", "../runs", "", "a/b"):
        with raises(RunMissingError, "run_folder_missing"):
            RunFolder.open(name, [tmp_path / "runs"])


def test_queries_that_duckdb_refuses_are_errors(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    with raises(SqlError, "sql_failed"):
        sql(run.path, "SELECT nothing FROM rollouts")
    with raises(SqlError, "sql_without_result"):
        sql(run.path, "")


def test_metrics_of_steps_have_flat_names(tmp_path: Path) -> None:
    run = RunFolderWriter(tmp_path)
    run.metrics([{"step": 1, "seconds": {"train": 0.5}, "policy_version": "1.1"}, {"step": 2, "reward_mean": 1}])
    found = sql(run.path, "SELECT * FROM steps ORDER BY step").to_pylist()
    assert found == [
        {"step": 1, "seconds_train": 0.5, "policy_version": "1.1", "reward_mean": None},
        {"step": 2, "seconds_train": None, "policy_version": None, "reward_mean": 1.0},
    ]


@pytest.mark.parametrize(
    "flags",
    [
        *(["--step", text] for text in ("abc", "-1", "1-", "1-x", "1-2-3", "1.5", "٣")),
        *(["--part", text] for text in ("x", "x=", "=1", "x=nan", "x=inf", "a=b=c")),
        *([name, text] for name in ("--reward-min", "--reward-max") for text in ("nan", "-inf")),
        *(["--limit", text] for text in ("0", "-1")),
    ],
)
def test_filter_of_rollouts_that_is_not_a_number_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    run = RunFolderWriter(tmp_path)
    name, value = flags
    assert main(["--runs", str(run.path.parent), "rollouts", run.path.name, f"{name}={value}"]) == 1
    assert capsys.readouterr().err.startswith("error [invalid_flag]: ")
