"""docs/rollouts.md: every query and every Python block runs on a run, and each query answers its question."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.run_folder import synthetic_run

import gristmill

pytest.importorskip("duckdb")
PAGE = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text()
QUESTIONS = dict(re.findall(r"### (.*?)\n.*?```sql\n(.*?)```", PAGE, re.S))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("runs"), steps=20, groups_per_step=6, group_size=4).path


def answer(run: Path, words: str) -> list[dict[str, Any]]:
    (query,) = (query for title, query in QUESTIONS.items() if words in title)
    found: list[dict[str, Any]] = gristmill.sql(run, query).to_pylist()
    return found


def test_page_has_ten_questions() -> None:
    assert len(QUESTIONS) == 10


def test_worst_groups_are_of_the_last_ten_steps(run: Path) -> None:
    found = answer(run, "worst")
    assert len(found) == 20
    assert {row["step"] for row in found} <= set(range(11, 21))
    assert [row["reward"] for row in found] == sorted(row["reward"] for row in found)


def test_hard_rows_have_lower_rewards_than_easy_rows(run: Path) -> None:
    found = answer(run, "hard rows")
    assert [row["part"] for row in found] == [1, 2, 3, 4]
    assert found[0]["last_quarter"] < found[3]["last_quarter"]


def test_length_is_in_buckets_of_32_tokens(run: Path) -> None:
    found = answer(run, "longer")
    assert all(row["tokens_from"] % 32 == 0 for row in found)
    assert sum(row["completions"] for row in found) == 20 * 6 * 4
    assert found[-1]["truncated"] > found[0]["truncated"] == 0


def test_rows_that_are_always_the_same_have_one_reward(run: Path) -> None:
    found = answer(run, "always right")
    assert found
    assert {row["verdict"] for row in found} == {"always right", "always the same"}
    assert all((row["reward"] == 1.0) == (row["verdict"] == "always right") for row in found)


def test_rewards_that_disagree_differ_by_their_range(run: Path) -> None:
    found = answer(run, "disagree")
    assert found
    assert all({value for _, value in row["reward_parts"]} == {0.0, 1.0} for row in found)


def test_truncation_is_listed_for_every_step(run: Path) -> None:
    assert [row["step"] for row in answer(run, "truncated")] == list(range(1, 21))


def test_time_of_a_rollout_is_next_to_the_phases_of_its_step(run: Path) -> None:
    found = answer(run, "How long")
    assert [row["step"] for row in found] == list(range(1, 21))
    assert all((row["seconds_wait"], row["seconds_train"]) == (1.5, 0.5) for row in found)
    assert all(row["median"] <= row["slowest"] for row in found)


def test_completions_that_repeat_themselves_are_found(run: Path) -> None:
    found = answer(run, "garbled")
    assert {(row["group_id"], row["sequence"]) for row in found} == {
        (f"g{row:08d}", 0) for row in range(0, 134, 50) if row % 10 != 9
    }


def test_ratio_is_listed_by_staleness(run: Path) -> None:
    found = answer(run, "staleness")
    assert [row["staleness"] for row in found] == [0, 1, 2]
    assert all(0.9 < row["ratio"] <= row["ratio_p99"] for row in found)


def test_versions_are_compared_in_their_order(run: Path) -> None:
    found = answer(run, "versions")
    assert [row["version"] for row in found] == [f"1.{step}" for step in range(20)]


def test_python_blocks_of_the_page_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(run.parent)
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(compile(block.replace("runs/quickstart", str(run)), "rollouts.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "480 trained" in printed
    assert "acked groups with their content" in printed
