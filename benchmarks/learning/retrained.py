"""Does a retraining predict the ranking of live runs? One live run of GRPO is trained again with each objective, and
the estimated rewards are compared with the committed curves of live runs."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import script
from benchmarks.learning.report import WINDOW
from benchmarks.learning.runs import Case, train
from benchmarks.services import Services
from tests.support.stack import MODELS_DIR, ROOT

from gristmill.folders import RunFolder
from gristmill.internal.lines import read_jsonl
from gristmill_trainer.replay.recorded import RecordedRun
from gristmill_trainer.replay.retrain import Request, retrain

LIVE = ROOT / "benchmarks" / "results" / "learning-objectives.json"
_ARCHIVE_SECONDS = 60.0
HOLDS = 0.6
"""Kendall's tau from which the ranking of six objectives counts as held: at most 3 of 15 pairs are swapped."""


@dataclass(frozen=True)
class Retrained:
    """One objective, trained on the groups of the recorded run. One value per step."""

    objective: str
    rewards: list[float]
    """Estimated reward (`reward_estimate`)."""
    sample_sizes: list[float]
    """Effective sample size, as a share of the completions."""


def study(services: Services, objectives: Sequence[str], steps: int, say: Callable[[str], None]) -> list[Retrained]:
    """Trains GRPO live for `steps` steps, and each objective on its archive."""
    case = Case("recorded", "quickstart", 0, {"objective": "grpo", "training_steps": steps})
    train(services, case)
    run = _recorded(services.folder / "runs" / case.name)
    found = []
    for objective in objectives:
        out = services.folder / "runs" / f"{case.name}-{objective}"
        retrain(run, Request({"objective": objective}, force=True), out, lambda _: None)
        rows = read_jsonl(out / "metrics.jsonl")
        sizes = [row.get("effective_sample_size", math.nan) for row in rows]
        found.append(Retrained(objective, [row.get("reward_estimate", math.nan) for row in rows], sizes))
        say(f"{objective}: effective sample size {sizes[-1]:.1%} in step {len(rows)}")
    return found


def live_curves() -> dict[str, list[list[float]]]:
    """Returns the rewards per step of the committed live runs, one list per seed, by objective."""
    found: dict[str, list[list[float]]] = {}
    for curve in json.loads(LIVE.read_text())["curves"]:
        found.setdefault(curve["label"], []).append(curve["rewards"])
    return found


def page(facts: Mapping[str, str], found: Sequence[Retrained], live: Mapping[str, list[list[float]]]) -> str:
    """Returns the report as Markdown."""
    head = script.heading("Learning: six objectives retrained from one run of GRPO", facts)
    return "\n".join([*head, _TEXT, "", *_table(found, live)]) + "\n"


def plain(facts: Mapping[str, str], found: Sequence[Retrained]) -> str:
    """Returns all curves as JSON."""
    return json.dumps({"facts": dict(facts), "curves": [asdict(one) for one in found]})


def _recorded(folder: Path) -> RecordedRun:
    """Returns the run once the API has archived its last groups. Raises ReplayError after `_ARCHIVE_SECONDS`."""
    deadline = time.monotonic() + _ARCHIVE_SECONDS
    while True:
        run = RecordedRun.open(RunFolder.open(folder), MODELS_DIR)
        if not run.coverage().missing:
            return run
        if time.monotonic() > deadline:
            run.batch(run.last_step)
        time.sleep(0.5)


_TEXT = f"""\
The quickstart was trained once with GRPO. `gristmill retrain --objective ... --force` trained each objective on its
archive. The reward of a retraining is `reward_estimate`, because the retrained policy samples no completions. The live
rewards are the means of the committed live runs (learning-objectives.json). All rewards are means of {WINDOW} steps.

tau is Kendall's rank correlation of the two rankings. The ranking counts as held from {HOLDS} on, as long as it held at
every earlier row. "Live seed" is the mean tau of the ranking of one live seed with the ranking of the other seeds: the
agreement that another live run would reach."""


def _table(found: Sequence[Retrained], live: Mapping[str, list[list[float]]]) -> Iterator[str]:
    names = [one.objective for one in found]
    last = min(len(one.rewards) for one in found)
    yield "| step | live ranking | retrained ranking | tau | live seed | lowest effective sample size |"
    yield "|-|-|-|-|-|-|"
    held = 0
    broken = False
    for step in range(WINDOW, last + 1, WINDOW):
        retrained = {one.objective: _mean(one.rewards, step) for one in found}
        seeds = [{name: _mean(live[name][seed], step) for name in names} for seed in range(_seeds(live, names))]
        tau = kendall(_average(seeds), retrained)
        broken = broken or tau < HOLDS
        held = held if broken else step
        noise = [kendall(one, _average([other for other in seeds if other is not one])) for one in seeds]
        size = min(one.sample_sizes[step - 1] for one in found)
        cells = [str(step), _ranking(_average(seeds)), _ranking(retrained), f"{tau:.2f}"]
        yield f"| {' | '.join([*cells, f'{statistics.fmean(noise):.2f}', f'{size:.1%}'])} |"
    yield ""
    yield f"The ranking of the objectives holds for {held} steps." if held else "The ranking does not hold at any step."


def _seeds(live: Mapping[str, list[list[float]]], names: Sequence[str]) -> int:
    return min(len(live[name]) for name in names)


def _average(rankings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(one[name] for one in rankings) for name in rankings[0]}


def kendall(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Returns Kendall's tau-a of two rankings of the same names: (concordant - discordant) / pairs."""
    pairs = list(itertools.combinations(one, 2))
    signs = [(one[a] - one[b]) * (other[a] - other[b]) for a, b in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs)


def _mean(values: Sequence[float], step: int) -> float:
    return statistics.fmean(values[step - WINDOW : step])


def _ranking(rewards: Mapping[str, float]) -> str:
    return " > ".join(sorted(rewards, key=lambda name: -rewards[name]))
