#!/usr/bin/env python3
"""Does it learn, and how fast: whole trainings on real parts (Redis, API, vLLM, environment, trainer).

    objectives   the quickstart with each objective, three seeds: steps to a reward of 0.85
    staleness    the quickstart, synchronous and with the environment up to 1, 2 and 4 steps ahead
    agent        an agent of two requests in its own process, through the gateway for agents
    smollm2      SmolLM2-135M, a real model, on sums of reasoning-gym that it is sometimes right on
    curriculum   the quickstart mixed with rows that are too easy and too hard, with and without a curriculum
    retrained    one quickstart of GRPO, trained again with each objective, against the live runs of `objectives`

`make bench ARGS="learning objectives"`; results lie in benchmarks/results/learning-*.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import machine, script
from benchmarks.learning import curriculum, report, retrained, sums
from benchmarks.learning.runs import Case, Curve, train
from benchmarks.services import start_services

_TARGET = 0.85
_OBJECTIVES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "gspo")
_STALENESS = (0, 1, 2, 4)


class Study(NamedTuple):
    """The trainings of a study, and the beginning of its page."""

    model: str
    what: str
    title: str
    text: str
    target: float | None
    """Reward up to which the report counts steps."""
    cases: list[Case]


def main() -> None:
    options = _options()
    facts = machine.hardware() | machine.training("cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.study == "retrained":
            _retrained(options, folder, facts)
            return
        study = _study(options, folder)
        curves: list[Curve] = []
        with start_services(folder / "services", study.model) as started:
            for case in study.cases:
                curves.append(train(started, case))
                if options.study == "curriculum":  # the rewards of the quickstart's rows alone
                    rewards = curriculum.rewards(started.folder / "runs" / case.name)
                    curves[-1] = dataclasses.replace(curves[-1], rewards=rewards)
                script.say(f"{case.name}: reward {report.last(curves[-1]):.3f} at the end, {curves[-1].seconds:.0f} s")
                if options.results is not None:
                    _write(options.results, f"learning-{options.study}", study, facts, curves)
    print(_page(study, facts, curves))


def _retrained(options: argparse.Namespace, folder: Path, facts: dict[str, str]) -> None:
    services = folder / "services"
    with start_services(services, "tiny", GRISTMILL_RUNS_DIR=str(services / "runs")) as started:
        found = retrained.study(started, _OBJECTIVES, options.steps, script.say)
    page = retrained.page(facts, found, retrained.live_curves())
    script.publish(page, options.results, "learning-retrained", retrained.plain(facts, found))


def _write(results: Path, name: str, study: Study, facts: dict[str, str], curves: Sequence[Curve]) -> None:
    """Writes the results so far after every training, so that a failed training does not lose earlier results."""
    page = f"{_page(study, facts, curves)}\n![{study.title}]({name}.svg)\n"
    script.write(page, results, name, report.plain(facts, curves))
    report.plot(curves, study.title, study.target, results / f"{name}.svg")


def _study(options: argparse.Namespace, folder: Path) -> Study:
    if options.study == "objectives":
        cases = [_quickstart(name, seed, {"objective": name}) for name in _OBJECTIVES for seed in range(options.seeds)]
        text = (
            "The quickstart's own settings, one update a batch: the ratio to the old policy is 1, and no clip acts. "
            "What differs is how an objective weighs tokens and sequences."
        )
        return Study("tiny", "objective", "Quickstart, each objective", text, _TARGET, cases)
    if options.study == "staleness":
        cases = [
            _quickstart(f"staleness {ahead}", seed, {"max_staleness": ahead})
            for ahead in _STALENESS
            for seed in range(options.seeds)
        ]
        text = (
            "The environment may run that many steps ahead of the trainer; 0 is synchronous. All share the "
            "machine's cores."
        )
        return Study("tiny", "bound", "Quickstart, staleness", text, _TARGET, cases)
    if options.study == "agent":
        cases = [Case("agent", "agent", seed, {}) for seed in range(options.seeds)]
        text = (
            "configs/agent.yaml: a separate process calls the model twice for each rollout, with the openai client, "
            "through the gateway for agents."
        )
        return Study("tiny", "agent", "An agent of two requests", text, 0.8, cases)
    if options.study == "curriculum":
        config = str(curriculum.write(folder))
        settings: dict[str, object] = {"curriculum": dict(curriculum.SETTINGS)}
        both = {curriculum.WITHOUT: {}, curriculum.WITH: settings}
        cases = [Case(label, config, seed, {}, more) for seed in range(options.seeds) for label, more in both.items()]
        return Study("tiny", "rows", "Quickstart among rows of other difficulty", curriculum.TEXT, _TARGET, cases)
    config = str(sums.write(folder))
    cases = [Case("smollm2", config, seed, {}) for seed in range(options.seeds)]
    return Study("smollm2", "model", f"SmolLM2-135M, {sums.WHAT}", sums.TEXT, None, cases)


def _quickstart(label: str, seed: int, trainer: dict[str, object]) -> Case:
    return Case(label, "quickstart", seed, trainer)


def _page(study: Study, facts: dict[str, str], curves: Sequence[Curve]) -> str:
    head = script.heading(f"Learning: {study.title}", facts)
    found = report.table(curves, study.what, study.target)
    of_both = {curve.label for curve in curves} == {curriculum.WITHOUT, curriculum.WITH}
    result = ["", curriculum.ratio(curves, _TARGET)] if of_both else []
    return "\n".join([*head, study.text, "", *found, *result]) + "\n"


def _options() -> argparse.Namespace:
    parser = script.parser("learning", __doc__)
    parser.add_argument("study", choices=("objectives", "staleness", "agent", "smollm2", "curriculum", "retrained"))
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each")
    parser.add_argument("--steps", type=int, default=60, help="steps of the study retrained")
    return parser.parse_args()


if __name__ == "__main__":
    main()
