"""The quickstart mixed with rows that are too easy and too hard, for trainings with and without a curriculum."""

from __future__ import annotations

import json
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from benchmarks.learning.report import steps_to
from benchmarks.learning.runs import Curve
from tests.support.stack import ROOT

from gristmill import PolicyVersion
from gristmill.internal.saved import saved_groups

ROWS: Final = 32
"""Rows that are too easy, and as many that are too hard."""
STEPS: Final = 130
SETTINGS: Final[Mapping[str, Any]] = {"band": [0.05, 0.8], "window": 1, "rest": 16}
WITHOUT, WITH = "without", "curriculum"
WEIGHTS: Final = {"sums": 1, "easy": 4, "hard": 5}
TEXT: Final = (
    f"One prompt of ten is a sum of the quickstart. Four are too easy: {ROWS} sums for which the number in any form "
    "counts, and which the model adds from the start. Five are too hard: "
    f"{ROWS} products of three-digit numbers, which the model never gets right. The curriculum is "
    f"`{json.dumps(dict(SETTINGS))}`. The reward is the mean over the quickstart's sums of a step. Each of the 800 "
    "sums comes once before one comes again, so until then the sums that rest do not bias it.\n\n"
    "If one prompt of three is a sum of the quickstart, the curriculum does not help: of one training each, the one "
    "without took 45 steps to 0.85, and the one with the curriculum (`rest: 8`) 55. A likely reason is that Adam's "
    "steps do not become smaller with fewer such prompts, only noisier."
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
    files = {"sums": quickstart / "train.jsonl", "easy": folder / "easy.jsonl", "hard": folder / "hard.jsonl"}
    settings["sources"] = [
        {
            "name": name,
            "weight": WEIGHTS[name],
            "dataset": {"dataset_path": str(file)},
            "rewards": rewards if name == "sums" else [number],
        }
        for name, file in files.items()
    ]
    settings["data_path_to_save_groups"] = _SAVED
    settings["trainer"]["training_steps"] = STEPS
    path = folder / "mixed.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def rewards(run: Path) -> list[float]:
    """Returns the mean reward of the quickstart's sums in each step of a synchronous run. `run`: the run's folder.

    A step without a sum, which is possible when all sums rest, has the reward of the step before.
    """
    found: dict[int, list[float]] = defaultdict(list)
    with (run / _SAVED).open("rb") as file:
        for group in saved_groups(file):
            if group.source == "sums":
                step = max(PolicyVersion.parse(label).step for label in group.versions) + 1
                found[step] += [one.total for one in group.completions if one.total is not None]
    means = [statistics.fmean(found[1])]
    for step in range(2, max(found) + 1):
        means.append(statistics.fmean(found[step]) if step in found else means[-1])
    return means


def ratio(curves: Sequence[Curve], target: float) -> str:
    """Returns the sentence with the result: the steps to the target with the curriculum by those without.

    A training without the curriculum that never reached the target counts as long as it was, so the ratio is a bound.
    """
    ends = {label: [(one, steps_to(one, target)) for one in curves if one.label == label] for label in (WITHOUT, WITH)}
    if any(steps is None for _, steps in ends[WITH]):
        return "A training with the curriculum did not reach the target, so there is no ratio."
    without, with_it = ([steps or len(one.rewards) for one, steps in ends[label]] for label in (WITHOUT, WITH))
    bound = " at most" if any(steps is None for _, steps in ends[WITHOUT]) else ""
    found = statistics.median(with_it) / statistics.median(without)
    return (
        f"Median of the steps to {target:g} with the curriculum, divided by the median without:{bound} **{found:.2f}**."
    )
