"""`curriculum:` its shortest form, values without a meaning, and its place in the records of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill import ConfigError
from gristmill.run import MOST_GROUPS_OF_ROW, MOST_TURNS
from gristmill_env.data.dataset import RowOrder
from gristmill_env.run_settings import RunSettings
from gristmill_env.saved.group import settings_of
from gristmill_env.settings.task import CurriculumSpec


def read(folder: Path, *flags: str, **settings: Any) -> RunSettings:
    (folder / "run.yaml").write_text(json.dumps({"dataset": {"dataset_path": "sums.jsonl"}, **settings}))
    return RunSettings.read(["--config", str(folder / "run.yaml"), *flags], {}, "test")


def test_true_means_the_defaults_and_false_none(tmp_path: Path) -> None:
    assert read(tmp_path, curriculum=True).config.curriculum == CurriculumSpec()
    assert read(tmp_path, curriculum={"rest": 7}).config.curriculum == CurriculumSpec(rest=7)
    assert read(tmp_path, curriculum=False).config.curriculum is None
    assert read(tmp_path).config.curriculum is None
    flags = ("--set", "curriculum.band=[-1, 2.5]")
    assert read(tmp_path, *flags, curriculum={"window": 2}).config.curriculum == CurriculumSpec(
        band=(-1, 2.5), window=2
    )


@pytest.mark.parametrize(
    ("wrong", "key", "code"),
    [
        ({"band": [0.9, 0.1]}, "curriculum", "band_order"),
        ({"band": [0.5, 0.5]}, "curriculum", "band_order"),
        ({"band": [0.5]}, "curriculum.band.1", "missing"),
        ({"window": 0}, "curriculum.window", "greater_than_equal"),
        ({"window": 17}, "curriculum.window", "less_than_equal"),
        ({"rest": 0}, "curriculum.rest", "greater_than_equal"),
        ({"rest": 65}, "curriculum.rest", "less_than_equal"),
        ({"epochs": 3}, "curriculum.epochs", "unknown_key"),
    ],
)
def test_values_without_a_meaning_are_refused_with_their_place(
    tmp_path: Path, wrong: dict[str, Any], key: str, code: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, curriculum=wrong)
    assert refused.value.values["problems"] == {key: code}


def test_curriculum_distinguishes_runs_but_not_the_groups_that_they_save(tmp_path: Path) -> None:
    plain, with_it = (read(tmp_path, curriculum=value).config for value in (None, True))
    assert "curriculum" not in plain.recorded("tiny")
    assert with_it.recorded("tiny")["curriculum"] == {"band": [0.1, 0.9], "window": 1, "rest": 3}
    assert settings_of(plain, "tiny") == settings_of(with_it, "tiny")


@pytest.mark.parametrize(("rows", "turns"), [(2**20, 64), (2**25, 2), (2**27, 1)])
def test_turns_are_not_computed_further_ahead_than_the_api_keeps_them(rows: int, turns: int) -> None:
    assert RowOrder(rows, seed=0, shuffle=False).turns(3, 64) == [3 + epoch * rows for epoch in range(1, turns + 1)]


def test_limits_of_the_settings_are_those_of_the_reported_results() -> None:
    """The settings repeat the numbers: `gristmill.run` imports numpy, which processes of users' code do without."""
    limits = {
        name: next(one.le for one in CurriculumSpec.model_fields[name].metadata if hasattr(one, "le"))
        for name in ("window", "rest")
    }
    assert limits == {"window": MOST_GROUPS_OF_ROW, "rest": MOST_TURNS}
