"""The table of rollouts in docs/look-at-a-run.md: its queries and Python blocks run and answer its questions."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.run_folder import RunFolderWriter, record_of, synthetic_run

import gristmill
from gristmill import TrajectoryGroup
from gristmill_view import sql

pytestmark = pytest.mark.slow

pytest.importorskip("duckdb")
GUIDE = (Path(__file__).parents[3] / "docs" / "look-at-a-run.md").read_text()
PAGE = GUIDE.partition("\n## The table of rollouts\n")[2].partition("\n## ")[0]
QUESTIONS = dict(re.findall(r"^#### (.*?)\n.*?```sql\n(.*?)```", PAGE, re.M | re.S))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("runs"), steps=20, groups_per_step=6, group_size=4).path


@pytest.fixture(scope="module")
def branched(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with rollouts of 1, 2, 3 and 1 branches. Further branches train the last token of the first one."""
    writer = RunFolderWriter(tmp_path_factory.mktemp("branched"), "synthetic")
    writer.tokenizer()
    steps = sql(run, "SELECT DISTINCT group_id, step FROM rollouts WHERE acked").to_pylist()
    step_of = {row["group_id"]: row["step"] for row in steps}
    for whole in gristmill.read_rollouts(run):
        group = with_branches(whole)
        writer.trained(record_of(group, step_of[group.group_id]))
        writer.archive(group)
    (writer.path / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    return writer.path


def with_branches(group: TrajectoryGroup) -> TrajectoryGroup:
    source = np.repeat(np.arange(4), (1, 2, 3, 1))
    is_first = np.diff(source, prepend=-1) > 0
    ends = np.cumsum(group.lengths)[:-1]
    tokens, mask = np.split(group.tokens, ends), np.split(group.mask, ends)
    masks = [mask[at].copy() for at in source]
    for place in np.flatnonzero(~is_first):
        masks[place][:-1] = False
    reasons = [group.finish_reasons[at] if first else "stop" for at, first in zip(source, is_first, strict=True)]
    return dataclasses.replace(
        group,
        lengths=group.lengths[source],
        tokens=np.concatenate([tokens[at] for at in source]),
        mask=np.concatenate(masks),
        logprobs=np.where(np.concatenate(masks), np.float32(-1), np.float32(0)),
        rewards=group.rewards[source],
        reward_parts={name: [values[at] for at in source] for name, values in group.reward_parts.items()},
        finish_reasons=reasons,
        versions=[group.versions[at] for at in source],
        rollouts=source.astype(np.int32),
    )


def answer(run: Path, words: str) -> list[dict[str, Any]]:
    (query,) = (query for title, query in QUESTIONS.items() if words in title)
    found: list[dict[str, Any]] = sql(run, query).to_pylist()
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


@pytest.mark.parametrize(
    ("words", "columns"),
    [
        ("worst", ("group_id", "reward", "completions")),
        ("hard rows", ("part", "prompts", "first_quarter", "last_quarter")),
        ("always right", ("prompt", "groups", "verdict")),
        ("disagree", ("group_id", "reward")),
        ("truncated", ("step", "truncated")),
        ("How long", ("step", "median", "slowest")),
        ("versions", ("version", "completions", "reward")),
    ],
)
def test_rollout_with_branches_counts_once(run: Path, branched: Path, words: str, columns: tuple[str, ...]) -> None:
    def shown(path: Path) -> list[Any]:
        values = [[row[name] for name in columns] for row in answer(path, words)]
        return sorted([round(one, 9) if isinstance(one, float) else one for one in row] for row in values)

    assert shown(branched) == shown(run)


def test_length_of_a_rollout_is_the_length_of_all_its_branches(run: Path, branched: Path) -> None:
    whole, parts = answer(run, "longer"), answer(branched, "longer")
    assert sum(row["completions"] for row in parts) == sum(row["completions"] for row in whole)
    rewards = [sum(row["completions"] * row["reward"] for row in rows) for rows in (whole, parts)]
    assert rewards[0] == pytest.approx(rewards[1])
    tokens = [sum(24 * row["tokens"] for row in answer(path, "truncated")) for path in (run, branched)]
    assert tokens[1] == pytest.approx(tokens[0] + 20 * 6 * 3), "three further branches per group train one token each"


def test_python_blocks_of_the_page_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(run.parent)
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(compile(block.replace("runs/quickstart", str(run)), "look-at-a-run.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "480 trained" in printed
    assert "acked groups with their content" in printed
