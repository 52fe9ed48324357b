"""The learning benchmark's evaluation of curves."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import yaml
from benchmarks.learning import curriculum, report, sums
from benchmarks.learning.runs import Case, Curve

from gristmill.internal.saved import SavedCompletion, SavedGroup
from gristmill_env.run_settings import RunSettings
from gristmill_env.session import load_tasks


def _curve(rewards: list[float], seed: int = 0, label: str = "dapo") -> Curve:
    steps = len(rewards)
    return Curve(label, seed, rewards, [0.5] * steps, [100] * steps, seconds=20.0, stepping=0.5 * (steps - 1))


def test_steps_to_target_uses_the_mean_of_five_steps() -> None:
    assert report.steps_to(_curve([0, 0, 0, 0, 0, 1, 0, 0.5, 1, 1, 1, 1]), 0.7) == 10
    assert report.steps_to(_curve([1.0] * 5), 0.7) == 5
    assert report.steps_to(_curve([0.6] * 30), 0.7) is None


def test_run_that_never_reaches_the_target_counts_as_the_longest() -> None:
    there, later, never = ([0.0] * zeros + [1.0] * (20 - zeros) for zeros in (5, 10, 20))
    (_, _, line, *_) = report.table([_curve(there), _curve(never), _curve(later)], "objective", 0.9)
    assert line.startswith(
        "| dapo | 10 / never / 15 | 15 | 0.000 / 0.000 / 0.000 | 1.000 / 0.000 / 1.000 | 0.50 | 20 |"
    )
    (_, _, line, *_) = report.table([_curve(there), _curve(never), _curve(never)], "objective", 0.9)
    assert "| 10 / never / never | never |" in line


def test_plot_is_an_svg_with_identical_bytes_each_time(tmp_path: Path) -> None:
    curves = [_curve([seed / 10, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0], seed, label) for label in ("a", "b") for seed in (0, 1)]
    for name in ("one.svg", "two.svg"):
        report.plot(curves, "Title", 0.85, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "<svg" in (tmp_path / "one.svg").read_text()


def test_case_writes_the_shipped_configuration_with_its_overrides(tmp_path: Path) -> None:
    case = Case("staleness 2", "quickstart", 7, {"max_staleness": 2})
    case.write(tmp_path)
    written = yaml.safe_load((tmp_path / "quickstart-staleness-2-7.yaml").read_text())
    assert written["trainer"]["max_staleness"] == 2
    assert written["trainer"]["seed"] == written["dataset"]["seed"] == 7
    assert written["trainer"]["training_steps"] == 60
    assert Path(written["dataset"]["dataset_path"]).exists()


def test_sums_are_written_with_their_answers(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    Case("smollm2", str(sums.write(tmp_path)), 0, {}).write(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    assert len(rows) == sums.ROWS
    for row in rows[:50]:
        left, sign, right = row["question"].removesuffix(" =").split(": ")[1].split()
        assert int(row["answer"]) == int(left) + (int(right) if sign == "+" else -int(right))


def test_mixed_rows_are_sources_of_a_valid_configuration_with_and_without_a_curriculum(tmp_path: Path) -> None:
    config = str(curriculum.write(tmp_path))
    for case in (Case("a", config, 3, {}), Case("b", config, 3, {}, {"curriculum": dict(curriculum.SETTINGS)})):
        case.write(tmp_path)
        read = RunSettings.read(["--config", str(tmp_path / f"{case.name}.yaml")], {}, "test")
        assert (read.config.curriculum is None) == (case.label == "a")
        assert [source.config.dataset.seed for source in read.by_source()] == [3, 3, 3]
        assert [len(task.dataset) for task in load_tasks(read)] == [800, curriculum.ROWS, curriculum.ROWS]


def test_rewards_are_the_means_of_the_sums_of_each_step(tmp_path: Path) -> None:
    groups = [("sums", "1.0", [0.0, 1.0]), ("hard", "1.0", [0.0]), ("sums", "1.0", [1.0, 1.0]), ("sums", "1.2", [1.0])]
    lines = [
        SavedGroup(
            run="r",
            source=name,
            prompt="",
            versions=[label],
            completions=[SavedCompletion(text="", total=one) for one in totals],
        )
        for name, label, totals in groups
    ]
    (tmp_path / "groups.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert curriculum.rewards(tmp_path) == [0.75, 0.75, 1.0], "the second step has no sum"


def test_ratio_divides_the_medians_of_the_steps_to_the_target() -> None:
    slow, fast = ([0.0] * zeros + [1.0] * 20 for zeros in (16, 6))
    curves = [_curve(slow, label=curriculum.WITHOUT), _curve(fast, label=curriculum.WITH)]
    assert "**0.52**" in curriculum.ratio(curves, 1.0)  # 11 / 21
    assert "**" not in curriculum.ratio([*curves, _curve([0.0] * 9, label=curriculum.WITH)], 1.0)
    never = [_curve([0.0] * 44, label=curriculum.WITHOUT), curves[1]]
    assert "at most **0.25**" in curriculum.ratio(never, 1.0)  # 11 / 44
