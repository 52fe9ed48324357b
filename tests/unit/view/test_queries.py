"""The page's questions to the files of runs that are recorded in full, in part, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.groups import make_group
from tests.support.run_folder import CREATED, RunFolderWriter, record_of
from tests.unit.sdk.view.recorded import record

import gristmill
from gristmill.archive.run_file import write_run_file
from gristmill.view.queries import group_of, highlights_of, rollouts_of, step_of
from gristmill.view.source import RolloutQuery


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
def test_dropped_group_shows_its_prompt_its_completions_and_its_errors(run: RunFolderWriter, tmp_path: Path) -> None:
    (run.path / "dropped").mkdir()
    kept = {"group_id": "g00000003", "creation_ms": CREATED, "index": 41, "prompt": "1 / 0?", "prompt_text": "<1 / 0?>"}
    kept["messages"] = [{"role": "user", "content": "1 / 0?"}]
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


# --- Extracted answers ------------------------------------------------------------------------------------------
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


def test_step_has_no_groups_of_an_earlier_run_with_the_same_id(run: RunFolderWriter, tmp_path: Path) -> None:
    run.trained(record_of(group(), 1))
    run.archive(group())
    assert len(step_of((tmp_path,), "test", 1)["groups"]) == 1
    write_run_file(run.path, record(run_id="test", created_at=CREATED / 1000 + 5))
    assert step_of((tmp_path,), "test", 1)["groups"] == []
    assert rollouts_of((tmp_path,), "test", RolloutQuery())["rows"] == []
    assert highlights_of((tmp_path,), "test", [1]) == []


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
