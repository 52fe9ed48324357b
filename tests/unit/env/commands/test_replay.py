"""replay: the same completions under other rewards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.support.errors import raises

from gristmill_env.commands import ReplayOptions
from gristmill_env.commands.replay import ScoreChanges, replay
from gristmill_env.errors import RewardError, SavedError
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved import SavedGroup, read_groups

from .conftest import completion, group, names_in, save, shown

RIGHT, WRONG, SHAPED = "#### 2", "#### 3", "<answer>3</answer>"

OVERLONG = {
    "type": "trl:trl.rewards:get_soft_overlong_punishment",
    "weight": 1.0,
    "params": {"max_completion_len": 100, "soft_punish_cache": 20},
}


def launch(*flags: str) -> RunSettings:
    return RunSettings.read(flags, {"GRISTMILL_MODELS_DIR": "/nowhere"}, "test")


async def test_replay_of_no_groups_leaves_no_file(tmp_path: Path, console: Console) -> None:
    (tmp_path / "none.jsonl").touch()
    options = ReplayOptions(saved=tmp_path / "none.jsonl", out=tmp_path / "scored.jsonl")
    with raises(SavedError, "no_groups", path=options.saved):
        await replay(launch(), options, console)
    assert not (tmp_path / "scored.jsonl").exists()


async def test_replay_replaces_scores_and_keeps_the_rest(tmp_path: Path, console: Console) -> None:
    by_format = {"dataset": {"reward_functions": [{"type": "format", "weight": 1.0, "params": {}}]}, "group_size": 3}
    old = [
        group(
            completion(RIGHT, 0.0, scores={"format": 0.0}, token_ids=[1]),
            completion(WRONG, 0.0, scores={"format": 0.0}),
            completion(SHAPED, 1.0, scores={"format": 1.0}),
            settings=by_format,
        ),
        group(completion(WRONG, 0.0), completion(WRONG, 1.0), completion(RIGHT, 0.5), row=1, settings=by_format),
    ]
    saved = save(tmp_path / "groups.jsonl", old)
    options = ReplayOptions(saved=saved, out=tmp_path / "new" / "groups.jsonl")
    await replay(launch("--reward_functions", "accuracy"), options, console)
    new = list(read_groups(tmp_path / "new" / "groups.jsonl"))
    assert [[c.total for c in one.completions] for one in new] == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    assert new[0].completions[0].scores == {"accuracy": 1.0}
    assert new[0].completions[0].token_ids == [1]
    accuracy: dict[str, Any] = {"type": "accuracy", "weight": 1.0, "params": {}}
    assert new[0].settings == {"dataset": {"reward_functions": [accuracy]}, "group_size": 3}
    assert list(read_groups(saved)) == old
    text = shown(console)
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["format", "0.333", "", "0", ""],
        ["accuracy", "", "0.333", "", "0"],
        ["total", "0.417", "0.333", "0", "0"],
    ]
    counted = " ".join(line for line in text.splitlines() if " change " in line)
    assert re.findall(r"\d+ \w+", counted) == [
        "2 groups",
        "4 completions",
        "2 groups",
    ]  # other orders; other signs of the advantage


def test_replay_counts_changed_orders_and_advantage_signs() -> None:
    def totals(*values: float | None) -> SavedGroup:
        return group(*(completion(str(at), value) for at, value in enumerate(values)))

    def compared(old: SavedGroup, new: SavedGroup) -> tuple[int, int, int]:
        comparison = ScoreChanges()
        comparison.add(old, new)
        return comparison.reordered, comparison.turned, comparison.turned_groups

    assert compared(totals(0, 1), totals(1, 0)) == (1, 2, 1)
    assert compared(totals(0, 1), totals(0, 5)) == (0, 0, 0)
    assert compared(totals(0, 1), totals(1, 1)) == (0, 2, 1)  # no longer taught
    assert compared(totals(0, 0.4, 1), totals(0, 0.6, 1)) == (0, 1, 1)  # below the mean before, above it now
    assert compared(totals(0, None), totals(1, 0)) == (0, 1, 1)  # of one score, only that one counts
    assert compared(totals(0.1 + 0.2, 0.3), totals(0.3, 0.1 + 0.2)) == (0, 0, 0)
    assert compared(totals(None), totals(None)) == (0, 0, 0)
    stored = [float(np.float32(value)) for value in (0.1, 0.3, 0.5, 0.3)]  # an archive keeps float32
    assert compared(totals(*stored), totals(0.1, 0.3, 0.5, 0.3)) == (0, 0, 0)
    assert compared(totals(*(1000 * value for value in stored)), totals(100, 300, 500, 300)) == (0, 0, 0)
    assert compared(totals(0.1, 0.3, 0.5, 0.3), totals(0.1, 0.3001, 0.5, 0.3)) == (0, 2, 1)
    assert compared(totals(0.5), totals(-0.5)) == (0, 1, 1)  # a group of one: its raw reward


async def test_replay_without_rewards_uses_the_saved_rewards(tmp_path: Path, console: Console) -> None:
    spec = {"type": "accuracy", "weight": 0.5, "params": {}}
    old = group(completion(RIGHT, 0.0), settings={"dataset": {"reward_functions": [spec]}})
    options = ReplayOptions(saved=save(tmp_path / "groups.jsonl", [old]), out=tmp_path / "new.jsonl")
    await replay(launch(), options, console)
    (new,) = read_groups(tmp_path / "new.jsonl")
    assert new.totals == [0.5]


async def test_replay_reads_the_answer_from_another_column(tmp_path: Path, console: Console) -> None:
    old = group(completion("<answer>9</answer>", 0.0), columns={"result": 9.0})
    options = ReplayOptions(saved=save(tmp_path / "groups.jsonl", [old]), out=tmp_path / "new.jsonl")
    await replay(launch("--reward_functions", "exact_match", "--answer_field", "result"), options, console)
    (new,) = read_groups(tmp_path / "new.jsonl")
    assert new.totals == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "old", "code", "values"),
    [
        (["--reward_functions", "accuracy"], group(completion("2", 0.0), answer=None),
         "answer_not_saved", {"reward": "accuracy", "row": 0}),
        (["--reward_functions", "length"], group(completion("2", 0.0)),
         "token_ids_not_saved", {"reward": "length", "row": 0}),
        ([], group(completion("2", 0.0), settings={"dataset": {"reward_functions": [OVERLONG]}}),
         "token_ids_not_saved", {"reward": "get_soft_overlong_punishment", "row": 0}),
        ([], group(completion("2", 0.0)), "rewards_not_saved", {}),
    ],
)  # fmt: skip
async def test_replay_refuses_rewards_that_need_unsaved_values(
    tmp_path: Path, console: Console, flags: list[str], old: SavedGroup, code: str, values: dict[str, object]
) -> None:
    saved = save(tmp_path / "groups.jsonl", [old])
    with raises(SavedError, code, **values):
        await replay(launch(*flags), ReplayOptions(saved=saved, out=tmp_path / "new.jsonl"), console)
    assert names_in(tmp_path) == ["groups.jsonl"]


async def test_replay_reports_a_mistyped_reward(tmp_path: Path, console: Console) -> None:
    saved = save(tmp_path / "groups.jsonl", [group(completion("2", 0.0))])
    with raises(RewardError, "unknown_reward", reward="acuracy"):
        await replay(launch("--reward_functions", "acuracy"), ReplayOptions(saved=saved), console)


async def test_replay_counts_the_saved_environment_reward_again(tmp_path: Path, console: Console) -> None:
    turns = [{"role": "assistant", "content": "3"}, {"role": "user", "content": "Lower."},
             {"role": "assistant", "content": "2"}]  # fmt: skip
    old = group(completion("2", 0.0, messages=turns, episode_reward=0.75), completion("3", 0.0, episode_reward=0.0))
    options = ReplayOptions(saved=save(tmp_path / "groups.jsonl", [old]), out=tmp_path / "new.jsonl")
    await replay(launch("--reward_functions", "episode"), options, console)
    (new,) = read_groups(tmp_path / "new.jsonl")
    assert new.totals == [0.75, 0.0]
    (tmp_path / "parts.py").write_text("def worst(episode_reward, episode_parts): return min(episode_parts.values())")
    parts = group(completion("2", 0.5, episode_reward=0.5, episode_parts={"right": 1.0, "short": 0.25}))
    options = ReplayOptions(saved=save(tmp_path / "parts.jsonl", [parts]), out=tmp_path / "worst.jsonl")
    await replay(launch("--reward_functions", f"{tmp_path}/parts.py:worst"), options, console)
    assert [one.totals for one in read_groups(tmp_path / "worst.jsonl")] == [[0.25]]
    nobody = save(tmp_path / "old.jsonl", [group(completion("2", 0.0))])
    with raises(SavedError, "episode_reward_not_saved", reward="episode", row=0):
        await replay(launch("--reward_functions", "episode"), ReplayOptions(saved=nobody), console)
