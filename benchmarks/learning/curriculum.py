"""The quickstart mixed with rows that are too easy and too hard, for trainings with and without a curriculum."""

from __future__ import annotations

import json
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from tests.support.stack import ROOT

from gristmill import PolicyVersion
from gristmill.saved import saved_groups

ROWS: Final = 32
"""Rows that are too easy, and as many that are too hard."""
STEPS: Final = 150
SETTINGS: Final[Mapping[str, Any]] = {"band": [0.05, 0.8], "groups": 1, "rest": 16}
TEXT: Final = (
    f"One prompt of three is a sum of the quickstart. One is too easy: one of {ROWS} sums for which the number in any "
    f"form counts, and which the model adds from the start. One is too hard: one of {ROWS} products of three-digit "
    f"numbers, which the model never gets right. The curriculum is `{json.dumps(dict(SETTINGS))}`. The reward is the "
    "mean over the quickstart's sums of a step. Each of the 800 sums comes once before one comes again, so until then "
    "the sums that rest do not bias it."
)
_SAVED: Final = "groups.jsonl"


def write(folder: Path) -> Path:
    """Writes the data sets and the configuration into `folder`. Returns the configuration's path."""
    drawn = random.Random(1)
    quickstart = ROOT / "configs" / "datasets" / "quickstart"
    easy = drawn.sample((quickstart / "train.jsonl").read_text().splitlines(), ROWS)
    (folder / "easy.jsonl").write_text("\n".join(easy) + "\n")
    with (folder / "hard.jsonl").open("w") as file:
        for _ in range(ROWS):
            a, b = drawn.randrange(100, 1000), drawn.randrange(100, 1000)
            file.write(json.dumps({"question": f"What is {a} * {b}?", "answer": f"#### {a * b}"}) + "\n")
    settings = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    dataset = settings["dataset"]
    rewards = dataset.pop("reward_functions")
    shared = ("prompt_field", "answer_field", "max_tokens", "temperature")
    number = {"type": "accuracy", "params": {"last_number": True}}
    settings["dataset"] = {key: dataset[key] for key in shared}
    settings["sources"] = [
        {"name": "sums", "weight": 1, "dataset": {"dataset_path": str(quickstart / "train.jsonl")}, "rewards": rewards},
        {"name": "easy", "weight": 4, "dataset": {"dataset_path": str(folder / "easy.jsonl")}, "rewards": [number]},
        {"name": "hard", "weight": 5, "dataset": {"dataset_path": str(folder / "hard.jsonl")}, "rewards": [number]},
    ]
    settings["data_path_to_save_groups"] = _SAVED
    settings["trainer"]["training_steps"] = STEPS
    path = folder / "mixed.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def rewards(run: Path) -> list[float]:
    """Returns the mean reward of the quickstart's sums in each step of a synchronous run. `run`: the run's folder."""
    found: dict[int, list[float]] = defaultdict(list)
    with (run / _SAVED).open("rb") as file:
        for group in saved_groups(file):
            if group.source == "sums":
                step = max(PolicyVersion.parse(label).step for label in group.versions) + 1
                found[step] += [one.total for one in group.completions if one.total is not None]
    return [statistics.fmean(found[step]) for step in sorted(found)]
