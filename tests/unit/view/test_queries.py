"""The page's questions to the files of runs that are recorded in full, in part, or not at all."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import duckdb
import numpy as np
import pytest
from tests.support.errors import raises
from tests.support.groups import make_group
from tests.support.run_folder import CREATED, RunFolderWriter, record_of
from tests.unit.view.recorded import record, rows, write_run

import gristmill
import gristmill_view
from gristmill import Example
from gristmill.archive.run_file import write_run_file
from gristmill_api.examples import example as api_example
from gristmill_view import ExtraMissingError, groups, queries, sql
from gristmill_view.facts import read_files
from gristmill_view.queries import group_of, highlights_of, prompt_of, rollouts_of, step_of
from gristmill_view.samples import samples_of
from gristmill_view.source import Download, RolloutQuery, ViewError
from gristmill_view.tables import literal, table_of


@pytest.fixture
def run(tmp_path: Path) -> RunFolderWriter:
    run = RunFolderWriter(tmp_path)
    run.tokenizer()
    run.metrics([{"step": step, "reward_mean": 0.5} for step in (1, 2)])
    return run


def group(number: int = 0, **changes: object) -> gristmill.TrajectoryGroup:
    made = make_group(f"g{number:08d}", lengths=((3, 6), (3, 6)), version=f"1.{number}", seed=number)
    return gristmill.TrajectoryGroup(**{**vars(made), **changes})


# --- Dropped groups --------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_dropped_group_shows_its_prompt_its_completions_and_its_errors(run: RunFolderWriter, tmp_path: Path) -> None:
    (run.path / "dropped").mkdir()
    kept = {"run": "test", "group_id": "g00000003", "creation_ms": CREATED, "index": 41, "prompt": "1 / 0?"}
    kept |= {"prompt_text": "<1 / 0?>", "messages": [{"role": "user", "content": "1 / 0?"}], "completions": []}
    failed = {"text": "none", "scores": {"near": None}, "errors": {"near": "ZeroDivisionError"}}
    groups = [kept | {"completions": [failed]}, kept | {"group_id": "g00000004", "error": "no board"}]
    (run.path / "dropped" / "reward_error.jsonl").write_text("".join(json.dumps(one) + "\n" for one in groups))
    run.drop("dropped", "g00000003", "g00000004", "g00000005", reason="reward_error")
    found = group_of((tmp_path,), "test", "g00000003")
    shown = ("index", "prompt", "messages", "outcome", "reason", "error")
    assert [found[name] for name in shown] == [41, "<1 / 0?>", kept["messages"], "dropped", "reward_error", None]
    assert [(one["text"], one["error"], one["reward"]) for one in found["completions"]] == [
        ("none", "near: ZeroDivisionError", None)
    ]
    without = group_of((tmp_path,), "test", "g00000004")
    assert (without["prompt"], without["error"], without["completions"]) == ("<1 / 0?>", "no board", [])
    listed = rollouts_of((tmp_path,), "test", RolloutQuery(outcome="dropped", order="row"))["rows"]
    assert [(row["index"], row["prompt"], row["error"]) for row in listed] == [
        (41, "<1 / 0?>", "near: ZeroDivisionError"),
        (41, "<1 / 0?>", "no board"),
        (None, None, None),
    ]


# --- Rollouts that failed --------------------------------------------------------------------------------------
@pytest.mark.slow
def test_rollouts_that_failed_are_shown_beside_those_that_were_trained(run: RunFolderWriter, tmp_path: Path) -> None:
    failed = [{"error": "agent_timeout", "text": f"attempt {number}"} for number in range(3)]
    kept = group(meta={"failed": failed})
    run.trained(record_of(kept, 1))
    run.archive(kept)
    (line,) = step_of((tmp_path,), "test", 1)["groups"]
    assert (line["outcome"], line["reason"], len(line["rewards"])) == ("trained", None, 2)
    found = group_of((tmp_path,), "test", "g00000000")
    assert (found["outcome"], len(found["completions"])) == ("trained", 2)
    assert found["left_out"] == [{"reason": one["error"], "error": one["text"]} for one in failed]
    listed = rollouts_of((tmp_path,), "test", RolloutQuery(outcome="left_out"))
    assert (listed["total"], {row["group_id"] for row in listed["rows"]}) == (3, {"g00000000"})


# --- Difficulty of rows ----------------------------------------------------------------------------------------
def played(
    number: int, index: int, rewards: tuple[float, float], source: str | None = None
) -> gristmill.TrajectoryGroup:
    meta: dict[str, object] = {"index": index, "submitted_ms": 1000 - number}  # the last number was submitted first
    made = make_group(f"g{number:08d}", rewards=rewards, seed=number)
    return dataclasses.replace(made, meta=meta | ({} if source is None else {"source": source}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reward"), [({}, 1.0), ({"curriculum": {"window": 2}}, 0.75), ({"curriculum": "?"}, 1.0)]
)
def test_difficulty_of_a_row_is_the_mean_reward_of_its_last_groups(
    run: RunFolderWriter, tmp_path: Path, settings: dict[str, object], reward: float
) -> None:
    kept = record(run_id="test", created_at=CREATED / 1000)
    write_run_file(run.path, kept.model_copy(update={"env": {**kept.env, **settings}}))
    run.archive(played(0, 5, (1.0, 1.0)), played(1, 5, (0.0, 1.0)), played(2, 5, (0.0, 0.0)))
    run.archive(played(3, 5, (0.25, 0.25), "sums"), played(4, 5, (1.0, 0.0), "a'b"))
    (run.path / "dropped").mkdir()
    for number, reason in enumerate(["same_scores", "reward_error"], start=5):
        line = {"run": "test", "group_id": f"g{number:08d}", "creation_ms": CREATED, "index": 9 * number}
        line |= {"prompt": "?", "completions": [{"text": "", "total": 0.125}]}
        (run.path / "dropped" / f"{reason}.jsonl").write_text(json.dumps(line) + "\n")
        run.drop("dropped", f"g{number:08d}", reason=reason)
    run.evaluation("held", "1.0", prompts=9)
    found = sql(run.path, "SELECT source, index, groups, reward, reward_all FROM difficulty ORDER BY source, index")
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        ("a'b", 5, 1, 0.5, 0.5), ("sums", 5, 1, 0.25, 0.25), (None, 5, 3, reward, 0.5), (None, 45, 1, 0.125, 0.125),
    ]  # fmt: skip
    shown = {name: group_of((tmp_path,), "test", name).get("seen") for name in ("g00000002", "g00000004", "g00000006")}
    assert shown == {
        "g00000002": f": reward {reward:g} lately, 3 groups",
        "g00000004": ": reward 0.5 lately, 1 group",
        "g00000006": "",
    }
    assert "seen" not in group_of((tmp_path,), "test", "held/0")


# --- The list of runs ------------------------------------------------------------------------------------------
def test_list_reads_the_metrics_of_many_runs_again_only_after_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(70):
        path = write_run(tmp_path / f"run-{number:02}", rows(1))
        for file in (path / "metrics.jsonl", *(path / "logs").iterdir()):
            os.utime(file, (1e9 + number,) * 2)
    read = Mock(wraps=read_files)
    monkeypatch.setattr(queries, "read_files", read)
    monkeypatch.setattr(queries, "_FRESH_S", 1e-9)
    listed = queries.run_lines((tmp_path,))
    assert ({line["state"] for line in listed}, read.call_count) == ({"stopped"}, 70)
    assert (queries.run_lines((tmp_path,)), read.call_count) == (listed, 70)
    write_run(tmp_path / "run-00", rows(2), {})
    (tmp_path / "run-01" / "logs" / "env.log").touch()
    (tmp_path / "run-02" / "model").mkdir()
    lines = {line["run"]: line for line in queries.run_lines((tmp_path,))}
    assert read.call_count == 73
    assert (lines["run-00"]["step"], lines["run-01"]["state"], lines["run-02"]["state"]) == (2, "open", "finished")
    for name in ("run-00", "run-01"):
        for file in (tmp_path / name).rglob("*.*"):
            os.utime(file, (1e9,) * 2)
    assert {line["state"] for line in queries.run_lines((tmp_path,))} == {"stopped", "finished"}


# --- Filters ---------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_filter_by_a_value_finds_the_rewards_and_the_steps_of_that_value(run: RunFolderWriter, tmp_path: Path) -> None:
    rewards = (50.1, -33.3, 1 / 3, 0.0, 12345.678)
    for number, step in enumerate([3_000_000, 3_000_001]):
        made = make_group(f"g{number:08d}", lengths=((3, 6),) * len(rewards), rewards=rewards, seed=number)
        run.trained(record_of(made, step))
        run.archive(made)
    for value in rewards:
        by_reward = RolloutQuery(reward_min=value, reward_max=value)
        by_part = RolloutQuery(part="length", part_min=value, part_max=value)
        for query in (by_reward, by_part):
            found = rollouts_of((tmp_path,), "test", query)["rows"]
            assert [row["reward"] for row in found] == [pytest.approx(value)] * 2
    by_step = rollouts_of((tmp_path,), "test", RolloutQuery(step_from=3_000_001, step_to=3_000_001))
    assert {row["step"] for row in by_step["rows"]} == {3_000_001}


# --- Downloads --------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("kind", list(Download))
def test_download_that_the_disk_cannot_hold_leaves_no_file(
    run: RunFolderWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Download
) -> None:
    run.archive(group())
    rollouts_of((tmp_path,), "test", RolloutQuery())
    monkeypatch.setattr(queries, "table_of", functools.partial(table_of, update=False))
    before = set((run.path / "dataset").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        with raises(ViewError, "download_not_written"):
            queries.download((tmp_path,), "test", RolloutQuery(), kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set((run.path / "dataset").iterdir()) == before


@pytest.mark.slow
def test_download_that_nobody_read_is_removed_by_a_later_update(run: RunFolderWriter, tmp_path: Path) -> None:
    run.archive(group())
    old, new = (Path(queries.download((tmp_path,), "test", RolloutQuery(), kind)) for kind in Download)
    os.utime(old, (0, 0))
    rollouts_of((tmp_path,), "test", RolloutQuery())
    assert (old.parent, old.exists(), new.exists()) == (run.path / "dataset", False, True)


# --- Missing packages -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("package", ["duckdb", "pyarrow"])
def test_page_without_the_packages_of_tables_is_an_error_with_a_remedy(
    run: RunFolderWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("rollouts", "rows", "highlights"):
        monkeypatch.delitem(sys.modules, f"gristmill_view.{module}", raising=False)
        monkeypatch.delattr(gristmill_view, module, raising=False)
    with raises(ViewError, "view_not_installed"):
        rollouts_of((tmp_path,), "test", RolloutQuery())
    if package == "pyarrow":
        with raises(ViewError, "view_not_installed"):
            highlights_of((tmp_path,), "test", [1])
    with raises(ExtraMissingError, "extra_missing", package=package):
        sql(run.path, "SELECT 1")


@pytest.mark.slow
def test_damaged_tokenizer_leaves_a_group_with_its_token_ids(run: RunFolderWriter, tmp_path: Path) -> None:
    (tokenizer,) = run.path.rglob("tokenizer.json")
    tokenizer.write_text("{")
    made = group()
    run.archive(made)
    first = group_of((tmp_path,), "test", "g00000000")["completions"][0]
    assert [token["name"] for token in first["tokens"]] == [str(token) for token in made.tokens[3:9]]
    assert first["text"] is None


# --- Extracted answers ------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_answer_is_none_only_if_the_environment_searched_for_it(run: RunFolderWriter, tmp_path: Path) -> None:
    run.archive(group(0, meta={"extracted": ["4", None]}), group(1, meta={}), group(2, meta={"extracted": "4"}))
    run.evaluation("step-000001", "1.1", 1)
    for group_id, expected in (
        ("g00000000", ["4", None]),
        ("g00000001", ["absent", "absent"]),
        ("g00000002", ["absent", "absent"]),
        ("step-000001~0", ["4"]),
    ):
        found = group_of((tmp_path,), "test", group_id)["completions"]
        assert [one.get("extracted", "absent") for one in found] == expected


# --- Steps without records -------------------------------------------------------------------------------------
@pytest.mark.slow
def test_step_of_a_run_without_records_is_marked_as_not_recorded(run: RunFolderWriter, tmp_path: Path) -> None:
    run.archive(group())
    found = step_of((tmp_path,), "test", 1)
    assert (found["groups"], found["recorded"]) == ([], False)
    page = rollouts_of((tmp_path,), "test", RolloutQuery(step_from=1, step_to=1))
    assert (page["total"], page["recorded"]) == (0, False)
    assert "recorded" not in rollouts_of((tmp_path,), "test", RolloutQuery(text="nothing like it"))


def test_step_of_a_synchronous_run_without_records_has_its_groups(run: RunFolderWriter, tmp_path: Path) -> None:
    write_run_file(run.path, record(run_id="test", created_at=CREATED / 1000))
    run.archive(group(0), group(1))
    assert [one["group_id"] for one in step_of((tmp_path,), "test", 2)["groups"]] == ["g00000001"]


@pytest.mark.slow
def test_step_has_no_groups_of_an_earlier_run_with_the_same_id(run: RunFolderWriter, tmp_path: Path) -> None:
    run.trained(record_of(group(), 1))
    run.archive(group())
    assert len(step_of((tmp_path,), "test", 1)["groups"]) == 1
    write_run_file(run.path, record(run_id="test", created_at=CREATED / 1000 + 5))
    assert step_of((tmp_path,), "test", 1)["groups"] == []
    assert rollouts_of((tmp_path,), "test", RolloutQuery())["rows"] == []
    assert highlights_of((tmp_path,), "test", [1]) == []


@pytest.mark.slow
def test_step_without_groups_of_a_run_with_records_is_recorded(run: RunFolderWriter, tmp_path: Path) -> None:
    run.trained(record_of(group(), 1))
    run.archive(group())
    assert "recorded" not in step_of((tmp_path,), "test", 1)
    assert step_of((tmp_path,), "test", 2)["recorded"] is True


def test_step_of_a_run_without_rollouts_is_not_about_records(run: RunFolderWriter, tmp_path: Path) -> None:
    found = step_of((tmp_path,), "test", 1)
    assert (found["groups"], found["recorded"], found["metrics"]["reward_mean"]) == ([], True, 0.5)


# --- Turns -----------------------------------------------------------------------------------------------------
def test_group_with_conversations_shows_its_prompt_and_its_turns(run: RunFolderWriter, tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Guess."}, {"role": "user", "content": "from 1 to 9"}]
    first = [
        *prompt,
        {"role": "assistant", "content": "<think>middle</think>5"},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": "7"},
    ]
    run.archive(group(messages=[first, [*prompt, {"role": "assistant", "content": "9"}]]))
    found = group_of((tmp_path,), "test", "g00000000")
    assert found["messages"] == prompt
    assert found["completions"][0]["turns"] == [
        {"role": "assistant", "content": "5", "thinking": "middle"},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": "7"},
    ]
    assert found["completions"][1]["turns"] == [], "one reply is shown as the text that was sampled"


def test_group_without_conversations_has_turns_from_its_mask(run: RunFolderWriter, tmp_path: Path) -> None:
    made = group()
    mask = made.mask.copy()
    mask[5:7] = False
    changed = group(mask=mask, logprobs=np.where(mask, made.logprobs, np.float32(0)))
    run.archive(changed)
    found = group_of((tmp_path,), "test", "g00000000")

    def text(start: int, end: int) -> str:
        return " ".join(f"t{token}" for token in made.tokens[start:end])

    assert found["messages"] is None
    assert found["completions"][0]["turns"] == [
        {"role": "assistant", "content": text(3, 5)},
        {"role": "environment", "content": text(5, 7)},
        {"role": "assistant", "content": text(7, 9)},
    ]
    assert found["completions"][1]["turns"] == []


def test_group_without_a_tokenizer_has_the_turns_that_the_environment_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_MODELS_DIR", str(tmp_path))
    run = RunFolderWriter(tmp_path)
    reply = {"role": "assistant", "content": "5"}
    run.archive(group(messages=[[{"role": "user", "content": "?"}, reply]] * 2))
    found = group_of((tmp_path,), "test", "g00000000")
    assert (found["prompt"], found["messages"]) == (None, [{"role": "user", "content": "?"}])
    assert [one["turns"] for one in found["completions"]] == [[reply], [reply]]


# --- Branches --------------------------------------------------------------------------------------------------
SUM: Any = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
ASKED = [{"role": "user", "content": "1 + 2?"}]


def branched(number: int = 0, **changes: Any) -> gristmill.TrajectoryGroup:
    """Three rollouts of 1, 2 and 3 branches with the rewards 0, 1 and 0.5.

    Each branch is a prompt of 3 tokens, a reply of 2, an answer of 1 and a reply of 3. The branches of a rollout share
    all but the last 4 tokens, and the first of them trains the shared reply.
    """
    rollouts = [0, 1, 1, 2, 2, 2]
    made = make_group(
        f"g{number:08d}",
        lengths=[(3, 6)] * 6,
        rewards=[0, 1, 1, 0.5, 0.5, 0.5],
        rollouts=rollouts,
        version="1.0",
        seed=number,
    )
    tokens, mask = made.tokens.reshape(6, 9).copy(), made.mask.reshape(6, 9).copy()
    mask[:, 5] = False
    for sequence, rollout in enumerate(rollouts):
        first = rollouts.index(rollout)
        tokens[sequence, :3] = tokens[0, :3]
        tokens[sequence, :5] = tokens[first, :5]
        mask[sequence, 3:5] = sequence == first
    logprobs = np.where(mask.ravel(), np.float32(-0.5), np.float32(0))
    fields: dict[str, Any] = {"tokens": tokens.ravel(), "mask": mask.ravel(), "logprobs": logprobs, **changes}
    return dataclasses.replace(made, **fields)


@pytest.mark.slow
def test_rollout_counts_once_in_every_number_of_a_step(run: RunFolderWriter, tmp_path: Path) -> None:
    from gristmill_trainer.data.samples import Statistics  # imports torch, which `make quick` does without

    group = branched()
    run.trained(record_of(group, 1))
    run.archive(group)
    mean = Statistics.of_groups([group]).reward_mean
    assert mean == 0.5, "0.583 over sequences"
    roots = (tmp_path,)
    (shown,) = step_of(roots, "test", 1)["groups"]
    assert (shown["rewards"], shown["sequences"]) == ([0, 1, 0.5], [0, 1, 3])
    page = rollouts_of(roots, "test", RolloutQuery(step_from=1, step_to=1, order="reward"))
    assert page["total"] == 3
    assert [(row["rollout"], row["sequence"], row["branches"]) for row in page["rows"]] == [
        (0, 0, 1),
        (2, 5, 3),
        (1, 2, 2),
    ]
    assert sum(bar["count"] for bar in page["histogram"]) == 3
    example = Example.model_validate_json(api_example(group.encode()))
    samples = samples_of(example, None)
    assert [sample.reward for sample in samples] == [0, 1, 0.5]
    best_and_worst = highlights_of(roots, "test", [1])[0]["rows"]
    assert [(row["reward"], row["rollout"], row["sequence"]) for row in best_and_worst] == [(1, 1, 2), (0, 0, 0)]
    query = "SELECT avg(reward) AS mean FROM rollouts WHERE branch = 0"
    assert sql(run.path, query).to_pylist() == [{"mean": mean}]
    assert f"(mean {mean})" in repr(group)


@pytest.mark.slow
def test_list_of_rollouts_has_the_last_branch_that_fits_its_filters(run: RunFolderWriter, tmp_path: Path) -> None:
    group = branched()
    run.archive(group)
    tokens = group.tokens.reshape(6, 9)
    text = " ".join(f"t{token}" for token in tokens[3, 6:])
    page = rollouts_of((tmp_path,), "test", RolloutQuery(text=text))
    assert [(row["rollout"], row["sequence"], row["branches"]) for row in page["rows"]] == [(2, 3, 3)]
    run.drop("dropped", "g00000009", reason="stale")
    run.evaluation("step-000001", "1.1", 2)
    everything = rollouts_of((tmp_path,), "test", RolloutQuery())
    assert everything["total"] == 3 + 1 + 2, "rows without content count too"


@pytest.mark.parametrize(("text", "sought"), [("Ο ΟΔΟΣ", "ΟΔΟΣ"), ("İstanbul", "İSTANBUL"), ("It's", "IT'S")])
def test_search_ignores_the_case_of_every_alphabet(text: str, sought: str) -> None:
    where = queries.conditions(RolloutQuery(text=sought))
    row = f"(SELECT {literal(text)} AS completion, NULL AS prompt)"
    with duckdb.connect() as database:
        assert database.execute(f"SELECT count(*) FROM {row} WHERE {where}").fetchall() == [(1,)]


def test_answer_of_a_rollout_is_known_in_all_its_branches(run: RunFolderWriter, tmp_path: Path) -> None:
    run.archive(branched(meta={"extracted": ["3", None, "4"]}))
    found = group_of((tmp_path,), "test", "g00000000")["completions"]
    assert [one["extracted"] for one in found] == ["3", None, "4"]


def nodes(entry: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(node["parent"], node["sequences"], node["continues"], node["turns"]) for node in entry["tree"]]


def test_rollout_with_branches_is_one_entry_with_a_tree_of_its_messages(run: RunFolderWriter, tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [SUM], "reasoning_content": "a sum"}
    path = [*ASKED, called, {"role": "tool", "tool_call_id": "c", "content": "3"}]
    messages = [[*path, {"role": "assistant", "content": str(n)}] for n in range(5)]
    side = [{"role": "user", "content": "a title?"}, called, path[-1], {"role": "assistant", "content": "Sums"}]
    group = branched(messages=[*messages, side])
    run.trained(record_of(group, 1))
    run.archive(group)
    found = group_of((tmp_path,), "test", "g00000000")
    assert found["messages"] == ASKED
    entries = found["completions"]
    assert [(one["rollout"], one["sequence"], one["reward"]) for one in entries] == [(0, 0, 0), (1, 1, 1), (2, 3, 0.5)]
    assert [len(one.get("branches", [])) for one in entries] == [0, 2, 3]
    call = {"id": "c", "name": "add", "arguments": [["a", "1"], ["b", "[2]"]]}
    reply = {"role": "assistant", "content": "", "tool_calls": [call], "thinking": "a sum"}
    result = {"role": "tool", "content": "3", "answers": {"id": "c", "name": "add"}}
    assert entries[0]["turns"] == [reply, result, {"role": "assistant", "content": "0"}]

    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text, "trained": True}

    assert nodes(entries[1]) == [
        (None, [1, 2], True, [{**reply, "trained": True}, result]),
        (0, [1], False, [said("1")]),
        (0, [2], False, [said("2")]),
    ]
    assert nodes(entries[2]) == [
        (None, [3, 4], True, [{**reply, "trained": True}, result]),
        (0, [3], False, [said("3")]),
        (0, [4], False, [said("4")]),
        (None, [5], False, [side[0], {**reply, "trained": False}, result, said("Sums")]),
    ]
    assert [len(one["tokens"]) for one in entries[2]["branches"]] == [6, 3, 3], "from the first trained token on"
    assert entries[2]["advantage"] == pytest.approx(0.5 - group.rewards.mean())


def test_branches_without_messages_are_a_tree_of_their_tokens(run: RunFolderWriter, tmp_path: Path) -> None:
    group = branched()
    run.archive(group)
    tokens = group.tokens.reshape(6, 9)

    def text(sequence: int, start: int, end: int) -> str:
        return " ".join(f"t{token}" for token in tokens[sequence, start:end])

    found = group_of((tmp_path,), "test", "g00000000")
    assert (found["messages"], found["prompt"]) == (None, text(0, 0, 3))

    def reply(sequence: int, start: int, end: int) -> dict[str, Any]:
        return {"role": "assistant", "content": text(sequence, start, end), "trained": True}

    def answer(sequence: int) -> dict[str, Any]:
        return {"role": "environment", "content": text(sequence, 5, 6)}

    assert nodes(found["completions"][1]) == [
        (None, [1, 2], True, [reply(1, 3, 5)]),
        (0, [1], False, [answer(1), reply(1, 6, 9)]),
        (0, [2], False, [answer(2), reply(2, 6, 9)]),
    ]


def test_one_reply_that_calls_tools_shows_its_calls(run: RunFolderWriter, tmp_path: Path) -> None:
    reply = {"role": "assistant", "content": None, "tool_calls": [SUM]}
    run.archive(group(messages=[[*ASKED, reply]] * 2))
    turn = group_of((tmp_path,), "test", "g00000000")["completions"][0]["turns"][0]
    assert (turn["content"], [call["name"] for call in turn["tool_calls"]]) == ("", ["add"])


def test_tokens_of_all_branches_of_a_rollout_are_bounded(
    run: RunFolderWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_MOST_TOKENS", 8)
    run.archive(branched())
    found = group_of((tmp_path,), "test", "g00000000")["completions"]
    assert [len(one["tokens"]) for one in found] == [6, 0, 0]
    assert [[len(one["tokens"]) for one in entry["branches"]] for entry in found[1:]] == [[6, 2], [6, 2, 0]]


# --- One prompt -------------------------------------------------------------------------------------------------
def same_prompt(number: int, run_id: str, rewards: tuple[float, float]) -> gristmill.TrajectoryGroup:
    """Returns a group of a run whose prompts are all alike."""
    made = make_group(f"g{number:08d}", run_id, ((3, 6), (3, 6)), rewards, f"1.{number}", seed=number)
    tokens = made.tokens.copy()
    tokens[0:3] = tokens[9:12] = [1, 2, 3]
    return gristmill.TrajectoryGroup(**{**vars(made), "tokens": tokens})


@pytest.mark.slow
def test_prompt_has_its_groups_of_all_steps_and_of_another_run(run: RunFolderWriter, tmp_path: Path) -> None:
    groups = [same_prompt(number, "test", (0.0, number / 4)) for number in (2, 0)]
    run.trained(*(record_of(one, int(one.group_id[1:]) + 1) for one in groups))
    run.archive(*groups, group(1))
    other = RunFolderWriter(tmp_path, "other")
    other.tokenizer()
    other.archive(same_prompt(0, "other", (1.0, 1.0)))
    found = prompt_of((tmp_path,), "test", "g00000000", "test")
    assert found["question"].split() == ["t1", "t2", "t3"]
    assert (found["total"], [one["step"] for one in found["groups"]]) == (2, [1, 3])
    last = found["groups"][1]
    assert (last["group_id"], last["rewards"], last["outcome"]) == ("g00000002", [0.0, 0.5], "trained")
    texts = [one["text"] for one in group_of((tmp_path,), "test", "g00000002")["completions"]]
    assert [last["worst"], last["best"]] == texts
    found = prompt_of((tmp_path,), "other", "g00000000", "test")
    assert [(one["step"], one["rewards"]) for one in found["groups"]] == [(None, [1.0, 1.0])]


@pytest.mark.slow
def test_prompt_that_is_not_on_disk_is_an_error(run: RunFolderWriter, tmp_path: Path) -> None:
    run.drop("dropped", "g00000003", reason="stale")
    with raises(ViewError, "prompt_missing"):
        prompt_of((tmp_path,), "test", "g00000003", "test")
    with raises(ViewError, "run_missing"):
        prompt_of((tmp_path,), "test", "g00000000", "../test")
